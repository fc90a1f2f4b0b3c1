"""UpdateOptimizer over MPI: the same bits as ranks in one process, with and without a thread that exchanges."""

import hashlib

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import DisagreementError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

torch.set_num_threads(1)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 8))


def wrap(model, comm, **settings):
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    return mpicomp.torch.UpdateOptimizer(base, model.named_parameters(), comm=comm, **({"warmup": 0} | settings))


def backward(model, optimizer, rank, step):
    inputs = torch.from_numpy(np.random.default_rng([rank, step]).normal(size=(5, 40)).astype(np.float32))
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :8]).square().mean().backward()


def digest(model):
    return hashlib.sha256(b"".join(own.detach().numpy().tobytes() for own in model.parameters())).hexdigest()


def in_one_process(size, steps, **settings):
    world, models = LocalWorld(size), [network() for _ in range(size)]
    optimizers = [wrap(model, end, **settings) for model, end in zip(models, world.transports, strict=True)]
    for step in range(steps):
        for rank in range(size):
            backward(models[rank], optimizers[rank], rank, step)
        world.run([own.rounds() for own in optimizers])
    world.run([own.synchronizing() for own in optimizers])
    return digest(models[0])


@pytest.mark.mpi
@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "topk", "feedback_decay": 0.9},
        {"compressor": "topk", "collective": "star-topk:ring", "sync_every": 3, "outer": {"lr": 0.7, "momentum": 0.9}},
        {"compressor": "topk", "collective": "allgather", "sync_delay": 1},
        {"compressor": "qsgd", "collective": "two-phase", "sync_every": 4, "sync_delay": 2, "fragments": 2},
        {"compressor": "topk", "collective": "allgather", "sync_every": 2, "sync_delay": 1, "second_moments": "shared"},
    ],
    ids=str,
)
def test_the_same_bits_as_in_one_process(comm, settings):
    if "collective" not in settings:
        settings = settings | {"collective": "allgather"}
    model = network()
    optimizer = wrap(model, comm, **settings)
    for step in range(9):
        backward(model, optimizer, comm.rank, step)
        optimizer.step()
    optimizer.synchronize()
    assert set(comm.allgather(digest(model))) == {in_one_process(comm.size, 9, **settings)}
    if settings.get("sync_delay") and comm.size > 1:
        assert optimizer.overlaps
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("every", [1, 3])
def test_ranks_that_run_out_of_batches(comm, every):
    """Means are those of the ranks that had batches since the exchange before."""
    batches = [5, 2, 0][: comm.size]
    model, other = network(), [network() for _ in batches]
    optimizer = wrap(model, comm, sync_every=every, compressor="dense")
    with optimizer.join():
        for step in range(batches[comm.rank]):
            backward(model, optimizer, comm.rank, step)
            optimizer.step()
    bases = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in other]
    shared = [own.detach().clone() for own in other[0].parameters()]
    for first in range(0, max(batches), every):
        changes = []
        for rank, (own, base) in enumerate(zip(other, bases, strict=True)):
            for step in range(first, min(first + every, batches[rank])):
                backward(own, base, rank, step)
                base.step()
            if first < batches[rank]:
                changes.append([mine.detach() - at for mine, at in zip(own.parameters(), shared, strict=True)])
        shared = [at + torch.stack(parts).mean(0) for at, parts in zip(shared, zip(*changes), strict=True)]  # noqa: B905
        with torch.no_grad():
            for own in other:
                for mine, at in zip(own.parameters(), shared, strict=True):
                    mine.copy_(at)
    for own, at in zip(model.parameters(), shared, strict=True):
        torch.testing.assert_close(own.detach(), at, rtol=1e-4, atol=1e-5)
    backward(model, optimizer, comm.rank, 20)  # all have batches again
    for _ in range(every):
        optimizer.step()
    assert len(set(comm.allgather(digest(model)))) == 1
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_moments_of_ranks_that_run_out_of_batches(comm):
    """An average is that of the ranks which have had batches since the exchange before."""
    batches = [3, 2, 0][: comm.size]
    model = network()
    base = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = mpicomp.torch.UpdateOptimizer(
        base,
        model.named_parameters(),
        comm=comm,
        compressor="dense",
        second_moments={"sync_every": 1, "compressor": "dense"},
    )
    squares = []
    with optimizer.join():
        for step in range(batches[comm.rank]):
            backward(model, optimizer, comm.rank, step)
            squares.append(model[0].weight.grad.square().numpy())
            optimizer.step()
    held = optimizer.state_dict()["mpicomp"]["fragments"][0]["second_moments"]["held"]["0.weight"]
    everyones = comm.allgather(squares)
    expected = np.zeros((30, 40))
    for square in everyones[0]:  # of the last exchange only rank 0 has had batches
        expected = 0.999 * expected + 0.001 * square
    np.testing.assert_allclose(held.numpy(), expected / (1 - 0.999**3), rtol=1e-3)
    assert len(set(comm.allgather(digest(model)))) == 1
    backward(model, optimizer, comm.rank, 20)  # all have batches again
    optimizer.step()
    assert len(set(comm.allgather(digest(model)))) == 1
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_without_join(comm):
    model = network()
    optimizer = wrap(model, comm, compressor="dense")
    backward(model, optimizer, comm.rank, 0)
    optimizer.step()
    with pytest.raises(DisagreementError, match=r"join\(\) must be the same on all ranks"):  # noqa: PT012
        if comm.rank:
            with optimizer.join():
                backward(model, optimizer, comm.rank, 1)
                optimizer.step()
        else:
            backward(model, optimizer, comm.rank, 1)
            optimizer.step()
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_parameters_of_another_model_on_one_rank(comm):
    model = network()
    if comm.rank == 1:
        with torch.no_grad():
            model[0].bias[3] = 1
    optimizer = wrap(model, comm, sync_delay=1)
    backward(model, optimizer, comm.rank, 0)
    with pytest.raises(DisagreementError, match=r"parameter '0.bias' has other values on rank 1"):
        optimizer.step()
    optimizer.close()
