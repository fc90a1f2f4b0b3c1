"""Data-parallel training in the slow and obvious way: one process, one model, the ranks' gradients averaged by hand."""

import contextlib
import copy
import socket

import numpy as np
import torch

import mpicomp

SMALL = 64  # bytes of a bucket, so that there are several


class Reference:
    """What a distributed run with dense exchange has to come to.

    A parameter for which no rank has a gradient has none; a rank's missing gradient counts as zeros.
    """

    def __init__(self, model, make, ranks):
        self.model = copy.deepcopy(model)
        self.optimizer = make(self.model)
        self.ranks = ranks

    def gradients(self, loss):
        """Average over the ranks; ``loss(model, rank)`` runs forward, and backward is run here."""
        total = {}
        for rank in range(self.ranks):
            self.model.zero_grad(set_to_none=True)
            losses = loss(self.model, rank)
            for each in losses if isinstance(losses, list) else [losses]:
                each.backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    own = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    total[name] = total.get(name, 0) + own.double()
        for name, parameter in self.model.named_parameters():
            parameter.grad = (total[name] / self.ranks).to(parameter.dtype) if name in total else None

    def step(self, loss, before_step=None):
        self.gradients(loss)
        if before_step is not None:
            before_step(self.model)
        self.optimizer.step()


def assert_same(model, reference, rtol=2e-5, atol=2e-6):
    for (name, own), other in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_replicas(model, comm):
    """All ranks hold the same bits."""
    own = [p.detach().contiguous().reshape(-1).view(torch.uint8) for p in model.parameters()]
    mine = torch.cat(own).numpy()
    everyones = np.empty((comm.size, mine.size), np.uint8)
    comm.Allgather(mine, everyones)
    assert (everyones == everyones[0]).all()


def batch(step, rank, columns=6, rows=4):
    rng = np.random.default_rng((step, rank))
    return torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32))


def network(seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers)


def sgd(model, **more):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, **more)


def distribute(model, comm, optimizer=None, compressor="dense", collective="allreduce", **settings):
    settings = {"bucket_bytes": SMALL, "overlap": True} | settings
    return mpicomp.torch.DistributedOptimizer(
        optimizer or sgd(model), model.named_parameters(), compressor, collective, comm=comm, **settings
    )


def square(model, step, rank):
    return model(batch(step, rank)).square().mean()


def train(model, optimizer, reference, comm, steps):
    """Do steps on the ranks' batches, and the same in the reference."""
    for step in range(steps):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda own, rank, step=step: square(own, step, rank))


class Branches(torch.nn.Module):
    """Two branches that are entered in whatever order is asked for, or left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = torch.nn.Linear(6, 6)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(4)])

    def forward(self, inputs, order):
        hidden = self.trunk(inputs)
        for place in order:
            hidden = torch.tanh(self.branches[place](hidden))
        return hidden


@contextlib.contextmanager
def gloo(comm):
    """A process group of the communicator's ranks."""
    port = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    port = comm.bcast(port)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
