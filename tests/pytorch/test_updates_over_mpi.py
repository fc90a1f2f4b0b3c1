"""UpdateOptimizer over MPI: the same bits as ranks in one process, with and without a thread that exchanges."""

import contextlib

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import DisagreementError

torch = pytest.importorskip("torch")

from local_replicas import Updates, bits  # noqa: E402


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 8))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrap(model, comm, base=adamw, **settings):
    return mpicomp.torch.UpdateOptimizer(base(model), model, comm=comm, **({"warmup": 0} | settings))


def loss_of(model, rank, step):
    inputs = torch.from_numpy(np.random.default_rng([rank, step]).normal(size=(5, 40)).astype(np.float32))
    return (model(inputs) - inputs[:, :8]).square().mean()


def backward(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()


def step_all(model, optimizer, comm, step):
    """Step on all ranks, after which they hold the same bits."""
    backward(model, optimizer, comm.rank, step)
    optimizer.step()
    assert len(set(comm.allgather(bits(model)))) == 1


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
def test_bits_equal_those_of_ranks_in_one_process(comm, settings):
    if "collective" not in settings:
        settings = settings | {"collective": "allgather"}
    model = network()
    optimizer = wrap(model, comm, **settings)
    for step in range(9):
        backward(model, optimizer, comm.rank, step)
        optimizer.step()
    optimizer.synchronize()
    ranks = Updates(comm.size, adamw, network, loss_of, **settings)
    ranks.run(range(9))
    ranks.world.run([optimizer.synchronizing() for optimizer in ranks.optimizers])
    assert set(comm.allgather(bits(model))) == {bits(ranks.models[0])}
    if settings.get("sync_delay") and comm.size > 1:
        assert optimizer.overlaps
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("every", [1, 3])
def test_means_are_of_ranks_with_batches(comm, every):
    """Means are those of the ranks that had batches since the exchange before."""
    batches = [5, 2, 0][: comm.size]
    model, other = network(), [network() for _ in batches]
    optimizer = wrap(model, comm, sync_every=every, compressor="dense")
    with optimizer.join():
        for step in range(batches[comm.rank]):
            backward(model, optimizer, comm.rank, step)
            optimizer.step()
    bases = [adamw(member) for member in other]
    shared = [parameter.detach().clone() for parameter in other[0].parameters()]
    for first in range(0, max(batches), every):
        changes = []
        for rank, (member, base) in enumerate(zip(other, bases, strict=True)):
            for step in range(first, min(first + every, batches[rank])):
                backward(member, base, rank, step)
                base.step()
            if first < batches[rank]:
                changes.append([p.detach() - at for p, at in zip(member.parameters(), shared, strict=True)])
        shared = [at + torch.stack(parts).mean(0) for at, parts in zip(shared, zip(*changes), strict=True)]  # noqa: B905
        with torch.no_grad():
            for member in other:
                for parameter, at in zip(member.parameters(), shared, strict=True):
                    parameter.copy_(at)
    for parameter, at in zip(model.parameters(), shared, strict=True):
        torch.testing.assert_close(parameter.detach(), at, rtol=1e-4, atol=1e-5)
    backward(model, optimizer, comm.rank, 20)  # all have batches again
    for _ in range(every):
        optimizer.step()
    assert len(set(comm.allgather(bits(model)))) == 1
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_averaged_moments_are_of_ranks_with_batches(comm):
    """An average is that of the ranks which have had batches since the exchange before."""
    batches = [3, 2, 0][: comm.size]
    model = network()
    moments = {"sync_every": 1, "compressor": "dense"}
    base = lambda model: torch.optim.Adam(model.parameters(), lr=0.01)  # noqa: E731
    optimizer = wrap(model, comm, base, warmup=None, compressor="dense", second_moments=moments)
    squares = []
    with optimizer.join():
        for step in range(batches[comm.rank]):
            backward(model, optimizer, comm.rank, step)
            squares.append(model[0].weight.grad.square().numpy())
            optimizer.step()
    held = optimizer.state_dict()["mpicomp"]["fragments"][0]["second_moments"]["held"]["0.weight"]
    rows = comm.allgather(squares)
    expected = np.zeros((30, 40))
    for square in rows[0]:  # of the last exchange only rank 0 has had batches
        expected = 0.999 * expected + 0.001 * square
    np.testing.assert_allclose(held.numpy(), expected / (1 - 0.999**3), rtol=1e-3)
    assert len(set(comm.allgather(bits(model)))) == 1
    step_all(model, optimizer, comm, 20)  # all have batches again
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_rank_without_join_is_refused(comm):
    model = network()
    optimizer = wrap(model, comm, compressor="dense")
    backward(model, optimizer, comm.rank, 0)
    optimizer.step()

    def step():
        with optimizer.join() if comm.rank else contextlib.nullcontext():
            backward(model, optimizer, comm.rank, 1)
            optimizer.step()

    with pytest.raises(DisagreementError, match=r"join\(\) must be the same on all ranks"):
        step()
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_parameters_that_differ_at_the_start_are_named(comm):
    model = network()
    if comm.rank == 1:
        with torch.no_grad():
            model[0].bias[3] = 1
    optimizer = wrap(model, comm, sync_delay=1)
    backward(model, optimizer, comm.rank, 0)
    with pytest.raises(DisagreementError, match=r"parameter '0.bias' has other values on rank 1"):
        optimizer.step()
    optimizer.close()
