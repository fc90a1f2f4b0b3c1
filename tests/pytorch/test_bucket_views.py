"""Gradients that lie where they are added to residuals: the same bits, one array less, and steps that are undone."""

import numpy as np
import pytest
import torch
from held_arrays import held_bytes
from replicas import Pair, assert_equal, assert_replicas, descent, distribute, network, square, train

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError, NonFiniteError
from mpicomp.job import stop

# The sum stays; the mean is left in its place; the residual is; messages are decoded by all.
KINDS = [
    (mpicomp.TopK(ratio=0.1), "allgather"),
    ("dense", "allreduce"),
    ("onebit", "two-phase"),
    (mpicomp.QSGD(bits=4, rounding="nearest"), "packed-allgather"),
    ("dense", "ring"),
]
# In place another order of operations makes its residual.


def viewed(model, comm, *args, **settings):
    return distribute(model, comm, descent(model), *args, gradient_as_bucket_view=True, **settings)


def are_views(model, optimizer):
    """Return for each gradient whether it lies in a bucket."""
    layout = optimizer.reducer.layout
    return [
        np.shares_memory(parameter.grad.numpy(), layout.gradient(name)) for name, parameter in model.named_parameters()
    ]


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("compressor", "collective", "overlap"),
    [*((*kind, True) for kind in KINDS), (*KINDS[0], None)],
    ids=str,
)
def test_views_change_no_bit(comm, compressor, collective, overlap):
    models, residuals = (network(), network()), []
    for model, views in zip(models, (False, True), strict=True):
        settings = {"overlap": overlap, "gradient_as_bucket_view": views}
        optimizer = distribute(model, comm, descent(model), compressor, collective, **settings)
        train(model, optimizer, range(6), comm.rank)
        residuals.append(optimizer.state_dict()["mpicomp"]["residuals"])
    assert all(are_views(model, optimizer))
    assert_equal(*models)
    assert all(torch.equal(residuals[0][name], residuals[1][name]) for name in residuals[0])


@pytest.mark.mpi(max_size=3)
def test_gradients_that_are_kept_accumulated_and_clipped(comm):
    """zero_grad(set_to_none=False), several backward passes, and changes of means: as without views."""

    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    pair = Pair(comm, overlap=None, gradient_as_bucket_view=True)
    for step in range(6):
        pair.optimizer.zero_grad(set_to_none=step % 2 == 0)
        with pair.optimizer.accumulate():
            square(pair.model, step, comm.rank).backward()
        square(pair.model, step, comm.rank).backward()
        pair.optimizer.synchronize()
        clip(pair.model)
        pair.optimizer.step()
        pair.reference.step(lambda model, step, rank: 2 * square(model, step, rank), step, clip)
    assert all(are_views(pair.model, pair.optimizer))
    pair.check()


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize(
    ("compressor", "collective", "overlap", "stale_at"),
    [*((*kind, True, 3) for kind in KINDS), (*KINDS[1], False, 1)],  # views are there after the first step
    ids=str,
)
def test_stale_step_loses_nothing(comm, monkeypatch, compressor, collective, overlap, stale_at):
    """Buckets that were exchanged before one rank asks all of them to agree: gradients plus residuals are conserved."""
    model = network()
    optimizer = viewed(model, comm, compressor, collective, overlap=overlap)
    for step in range(stale_at + 2):
        if comm.rank == comm.size - 1 and step == stale_at:
            monkeypatch.setattr(stop, "asked", True)
        twin = network()
        twin.load_state_dict(model.state_dict())
        square(twin, step, comm.rank).backward()
        before = held(optimizer) if step else {}
        train(model, optimizer, [step], comm.rank)
        assert optimizer.reducer.last_step.agreed == (step in (0, stale_at))
        after = held(optimizer)
        for name, parameter in model.named_parameters():
            gradient = dict(twin.named_parameters())[name].grad.double().numpy()
            brought = comm.allreduce(gradient + before.get(name, 0.0))
            kept = comm.allreduce(after[name])
            delivered = comm.size * parameter.grad.double().numpy()
            np.testing.assert_allclose(delivered + kept, brought, rtol=1e-5, atol=1e-6)
    assert_replicas(model, comm)


def held(optimizer):
    """Return what this rank owes of each parameter: its residual; quantisers without feedback have none."""
    layout = optimizer.reducer.layout
    return {member.name: layout.residual(member.name).astype(np.float64) for member in layout.members}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("compressor", "collective"), KINDS[:3], ids=str)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_undone_step_keeps_the_residual(comm, compressor, collective, nonfinite):
    model = network()
    optimizer = viewed(model, comm, compressor, collective, overlap=False, nonfinite=nonfinite)
    train(model, optimizer, range(3), comm.rank)
    before = optimizer.state_dict()["mpicomp"]["residuals"]
    optimizer.zero_grad()
    (square(model, 3, comm.rank) * (torch.inf if comm.rank == 0 else 1)).backward()
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError):
            optimizer.step()
    else:
        optimizer.step()
        assert all(not parameter.grad.any() for parameter in model.parameters())
    after = optimizer.state_dict()["mpicomp"]["residuals"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(model, optimizer, [4], comm.rank)
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("views", [True, False])
def test_no_array_but_the_residual(comm, views):
    """The reducer holds the residual beyond gradients, and the sum too where these are torch's."""
    numel = 400_000
    parameter = torch.nn.Parameter(torch.ones(numel))
    optimizer = mpicomp.torch.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], mpicomp.TopK(ratio=0.01), "allgather", comm=comm,
        overlap=False, gradient_as_bucket_view=views, same_batches=True,
    )  # fmt: skip
    before = held_bytes()
    for _ in range(20):
        optimizer.zero_grad()
        (parameter * torch.linspace(0, 1, numel)).sum().backward()
        optimizer.step()
    beyond = (held_bytes() - before) / (4 * numel) - views  # gradients that lie there are no more
    optimizer.close()
    assert 1 <= beyond < 1.5 if views else 2 <= beyond < 2.5


@pytest.mark.mpi(min_size=2, max_size=3)
def test_views_that_cannot_be_are_refused_by_all(comm):
    with pytest.raises(ConfigurationError, match=r"gradient_as_bucket_view: .*applies momentum.*; leave it out"):
        viewed(network(), comm, mpicomp.DGC(0.1, momentum=0.9), "allgather")
    with pytest.raises(ConfigurationError, match=r"gradient_as_bucket_view: with on_failure a step.*; leave it out"):
        viewed(network(), comm, on_failure="shrink")
    model = network()
    optimizer = distribute(model, comm, overlap=False, gradient_as_bucket_view=comm.rank == 0)
    with pytest.raises(DisagreementError, match="gradient_as_bucket_view"):
        train(model, optimizer, [0], comm.rank)
