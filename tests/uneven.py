"""Ranks with different numbers of batches: the loop that they run, and what training comes to."""

import torch
from replicas import Pair, square

BATCHES = [4, 7, 0, 5]  # of each rank; one has none


class UnevenPair(Pair):
    """Means of the reference are of the ranks that have a batch."""

    def __init__(self, comm, *args, batches=BATCHES, **settings):
        super().__init__(comm, *args, **settings)
        self.batches = batches[: comm.size]

    def join(self, change=None, body=None, first=0):
        """Train both, each rank on its batches; ``body`` makes a step in place of `step_as_usual`."""
        with self.optimizer.join():
            for step in range(first, first + self.batches[self.comm.rank]):
                (body or self.step_as_usual)(step, *(() if change is None else (change,)))

    def step_as_usual(self, step, change=None):
        self.backward(step)
        if change is not None:
            self.optimizer.synchronize()
            change(self.model)
        self.optimizer.step()

    def follow(self, change=None, loss=None, first=0):
        """Make the same steps in the reference."""
        for step in range(max(self.batches)):
            active = [rank for rank, count in enumerate(self.batches) if step < count]
            self.reference.step(loss or self.loss, first + step, change, active)


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
    state = [[torch.as_tensor(v).tolist() for v in values.values()] for values in optimizer.state.values()]
    settings = [{key: float(group[key]) for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    reports = comm.allgather((state, settings))
    assert all(report == reports[0] for report in reports)
