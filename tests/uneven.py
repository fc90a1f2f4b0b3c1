"""Ranks with different numbers of batches: the loop that they run, and what training comes to."""

import copy

import torch
from replicas import square

BATCHES = [4, 7, 0, 5]  # of each rank; one has none


class Uneven:
    """What training comes to, one process and one model: means are of the ranks that have a batch."""

    def __init__(self, model, make, batches):
        self.model = copy.deepcopy(model)
        self.optimizer = make(self.model)
        self.batches = batches
        self.active = []

    def run(self, loss, first=0, before_step=None, after_step=None):
        for step in range(max(self.batches)):
            self.active = [rank for rank, own in enumerate(self.batches) if step < own]
            total = {}
            for rank in self.active:
                self.model.zero_grad()
                losses = loss(self.model, first + step, rank)
                for each in losses if isinstance(losses, list) else [losses]:
                    each.backward()
                for name, parameter in self.model.named_parameters():
                    if parameter.grad is not None:
                        own = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                        total[name] = total.get(name, 0) + own.double()
            for name, parameter in self.model.named_parameters():
                some = total.get(name)
                parameter.grad = None if some is None else (some / len(self.active)).to(parameter.dtype)
            if before_step is not None:
                before_step(self.model)
            self.optimizer.step()
            if after_step is not None:
                after_step(self.optimizer)


def loop(model, optimizer, comm, batches, first=0, after_step=None):
    """What every rank runs."""
    with optimizer.join():
        for step in range(batches):
            optimizer.zero_grad()
            square(model, first + step, comm.rank).backward()
            optimizer.step()
            if after_step is not None:
                after_step()


def steps_of(optimizer):
    return optimizer.reducer.state_dict()["step"]


def assert_same_state(optimizer, comm):
    """Momenta and settings are the same on all ranks, too."""
    own = [[torch.as_tensor(v).tolist() for v in state.values()] for state in optimizer.state.values()]
    settings = [{key: float(group[key]) for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    everyones = comm.allgather((own, settings))
    assert all(other == everyones[0] for other in everyones)
