"""Data-parallel training in the slow and obvious way: one process, one model, the ranks' gradients averaged by hand."""

import contextlib
import copy
import socket
import sys
import weakref

import numpy as np
import torch

import mpicomp

SMALL = 64  # bytes of a bucket, so that there are several

_made = []  # weak references to optimizers of the test


class Reference:
    """What a distributed run with dense exchange has to come to.

    A parameter for which no rank has a gradient has none; a rank's missing gradient counts as zeros. ``loss`` gets a
    model, a step and a rank, and returns a loss or several.
    """

    def __init__(self, model, make, ranks):
        self.model = copy.deepcopy(model)
        self.optimizer = make(self.model)
        self.ranks = range(ranks)

    def gradients(self, loss, step, ranks=None):
        """Average over all ranks, or over some of them."""
        total, ranks = {}, self.ranks if ranks is None else ranks
        for rank in ranks:
            self.model.zero_grad(set_to_none=True)
            losses = loss(self.model, step, rank)
            for one in losses if isinstance(losses, list) else [losses]:
                one.backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    wide = torch.complex128 if gradient.is_complex() else torch.float64
                    total[name] = total.get(name, 0) + gradient.resolve_conj().to(wide)
        for name, parameter in self.model.named_parameters():
            parameter.grad = (total[name] / len(ranks)).to(parameter.dtype) if name in total else None

    def step(self, loss, step, change=None, ranks=None):
        self.gradients(loss, step, ranks)
        if change is not None:
            change(self.model)
        self.optimizer.step()


class Pair:
    """A model that ranks train with `distribute`, and the same in one process."""

    def __init__(self, comm, model=None, make=None, loss=None, reference=None, transport=None, **settings):
        self.comm, self.loss = comm, loss or square
        self.model, make = network() if model is None else model, make or sgd
        self.reference = Reference(self.model if reference is None else reference, make, comm.size)
        self.optimizer = distribute(self.model, transport or comm, make(self.model), **settings)

    def backward(self, step):
        self.optimizer.zero_grad()
        loss = self.loss(self.model, step, self.comm.rank)
        loss.backward()
        return loss

    def step_alone(self, step, change=None):
        """Step on the model; ``change`` is called with it when its gradients are means."""
        self.backward(step)
        if change is not None:
            self.optimizer.synchronize()
            change(self.model)
        self.optimizer.step()

    def step(self, step, change=None):
        self.step_alone(step, change)
        self.reference.step(self.loss, step, change)

    def run(self, steps, change=None):
        for step in steps:
            self.step(step, change)

    def check(self, **tolerances):
        assert_same(self.model, self.reference, **tolerances)
        assert_replicas(self.model, self.comm)


def assert_same(model, reference, rtol=2e-5, atol=2e-6):
    for (name, value), other in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal(model, other):
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name


def assert_replicas(model, comm):
    values = [p.detach().contiguous().reshape(-1).view(torch.uint8) for p in model.parameters()]
    row = torch.cat(values).numpy()
    rows = np.empty((comm.size, row.size), np.uint8)
    comm.Allgather(row, rows)
    assert (rows == rows[0]).all()


def batch(step, rank, columns=6, rows=4):
    rng = np.random.default_rng((step, rank))
    return torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32))


def network(seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers)


def sgd(model, **more):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, **more)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def descent(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def distribute(model, comm, optimizer=None, compressor="dense", collective="allreduce", **settings):
    settings = {"bucket_bytes": SMALL, "overlap": True} | settings
    made = mpicomp.torch.DistributedOptimizer(
        optimizer or sgd(model), model.named_parameters(), compressor, collective, comm=comm, **settings
    )
    return close_at_end(made)


def close_at_end(optimizer):
    """Return an optimizer, which is closed at the end of the test, if it still exists."""
    _made.append(weakref.ref(optimizer))
    return optimizer


def close_all():
    while _made:
        optimizer = _made.pop()()
        if optimizer is not None:
            optimizer.close()


def square(model, step, rank):
    return model(batch(step, rank)).square().mean()


def train(model, optimizer, steps, rank, loss=square):
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()


class Words(torch.nn.Module):
    """An embedding with sparse gradients, and a head."""

    def __init__(self, sparse=True, words=50):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(words, 3, sparse=sparse)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


def words_loss(model, step, rank):
    tokens = np.random.default_rng((step, rank)).integers(0, model.words.num_embeddings, (4, 5))
    return model(torch.from_numpy(tokens)).square().sum()


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


def branches_loss(model, step, rank):
    """Enter other branches on each rank and in each step, some in none."""
    order = [place for place in range(4) if (step + place) % 3 and (rank + step * place) % 2]
    return model(batch(step, rank), order).square().mean()


@contextlib.contextmanager
def gloo(comm):
    port = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{comm.bcast(port)}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        if (
            "torch.distributed.tensor" in sys.modules
        ):  # whose cache returns meshes of this group for equal ones of the next
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()


# Ranks with different numbers of batches.

BATCHES = [4, 7, 0, 5]  # of each rank; one has none


class UnevenPair(Pair):
    """Means of the reference are of the ranks that have a batch."""

    def __init__(self, comm, *args, batches=BATCHES, **settings):
        super().__init__(comm, *args, **settings)
        self.batches = batches[: comm.size]

    def join(self, change=None, body=None, first=0):
        """Train the model, each rank on its batches; ``body`` makes a step in place of `step_alone`."""
        with self.optimizer.join():
            for step in range(first, first + self.batches[self.comm.rank]):
                (body or self.step_alone)(step, *(() if change is None else (change,)))

    def follow(self, change=None, loss=None, first=0):
        for step in range(max(self.batches)):
            active = [rank for rank, count in enumerate(self.batches) if step < count]
            self.reference.step(loss or self.loss, first + step, change, active)


def loop(model, optimizer, comm, batches, first=0, after_step=None):
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
