"""Complex parameters, which are exchanged as pairs of reals."""

from itertools import product

import numpy as np
import pytest
import torch
from marks import slow
from replicas import Reference, UnevenPair, adam, assert_replicas, assert_same, descent, distribute, gloo, square, train

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


class Spectral(torch.nn.Module):
    """Complex factors between real layers; backward leaves a gradient of ``turned`` that is conjugated lazily.

    With ``pairs`` the parameters are real, and only forward takes them for complex ones.
    """

    def __init__(self, dtype=torch.complex64, pairs=False):
        super().__init__()
        torch.manual_seed(5)
        self.enter = torch.nn.Linear(6, 8)
        self.leave = torch.nn.Linear(8, 2)
        self.shapes = {"weight": (8, 8), "turned": (8,)}
        for name, shape in self.shapes.items():
            values = torch.randn(shape, dtype=dtype)
            if pairs:
                values = torch.view_as_real(values).reshape(*shape[:-1], -1)
            self.register_parameter(name, torch.nn.Parameter(values))

    def factor(self, name):
        values = getattr(self, name)
        return values if values.is_complex() else torch.view_as_complex(values.reshape(*self.shapes[name], 2))

    def forward(self, inputs):
        hidden = torch.tanh(self.enter(inputs)).to(self.factor("weight").dtype)
        return self.leave((hidden @ self.factor("weight") + self.factor("turned").conj()).abs().float())


def sgd(model):
    return descent(model, lr=0.05)


def resolve(model):
    """Torch's Adam fails with a lazy conjugate, and its SGD adds one with other rounding."""
    if model.turned.grad.is_conj():
        model.turned.grad = model.turned.grad.resolve_conj()


def updating(model, comm, optimizer, *settings, **more):
    return mpicomp.torch.UpdateOptimizer(optimizer, model, *settings, comm=comm, **more)


MAKES = {
    "overlap": (adam, lambda model, comm: distribute(model, comm, adam(model), overlap=True)),
    "later": (adam, lambda model, comm: distribute(model, comm, adam(model), overlap=False)),
    "updates": (sgd, lambda model, comm: updating(model, comm, sgd(model), 1, "dense")),
}
CASES = [(make, torch.complex128 if make == "later" else torch.complex64) for make in MAKES]
EACH = product(MAKES, (torch.complex64, torch.complex128))


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("make", "dtype"), [*CASES, *(slow(*case) for case in EACH if case not in CASES)])
def test_complex_gradients_and_updates_are_averaged(comm, make, dtype):
    plain, wrapped = MAKES[make]
    model = Spectral(dtype)
    reference = Reference(model, plain, comm.size)
    optimizer = wrapped(model, comm)
    for step in range(5):
        train(model, optimizer, [step], comm.rank)
        reference.step(square, step)
        assert_same(model, reference, **CLOSE)
    assert_replicas(model, comm)
    if make == "updates":
        assert torch.equal(optimizer.shared()["turned"], model.turned)
    optimizer.close()


WRAPPERS = {
    "distributed": lambda model, comm: distribute(
        model, comm, sgd(model), mpicomp.TopK(0.2), "allgather", overlap=False
    ),
    "updates": lambda model, comm: updating(model, comm, sgd(model), 2, mpicomp.TopK(0.2), "allgather", warmup=0),
}


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_complex_parameters_train_as_real_pairs_do(comm, make):
    models = Spectral(), Spectral(pairs=True)
    for model in models:
        with make(model, comm) as optimizer:
            for step in range(6):
                optimizer.zero_grad()
                square(model, step, comm.rank).backward()
                resolve(model)
                optimizer.step()
    for name, shape in models[0].shapes.items():
        values, pairs = getattr(models[0], name).detach(), getattr(models[1], name).detach()
        torch.testing.assert_close(torch.view_as_real(values), pairs.reshape(*shape, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("overlap", "views"), [(True, False), (False, True)])
def test_buckets_of_complex_gradients_are_averaged(comm, overlap, views):
    with gloo(comm):
        plain = Spectral()
        reference = Reference(plain, sgd, comm.size)
        model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1e-4, gradient_as_bucket_view=views)
        state = mpicomp.torch.DDPState(model, "dense", "allreduce", comm=comm, overlap=overlap)
        model.register_comm_hook(state, mpicomp.torch.ddp_comm_hook)
        optimizer = sgd(model)
        for step in range(4):
            train(model, optimizer, [step], comm.rank)
            reference.step(square, step)
            assert_same(plain, reference, **CLOSE)
        assert_replicas(plain, comm)
        state.close()


@pytest.mark.mpi(max_size=3)
def test_join_averages_complex_gradients_of_active_ranks(comm):
    def clip(model):  # ranks that are done receive the clipped gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    pair = UnevenPair(comm, Spectral(), sgd, batches=[2 + rank for rank in range(comm.size)])
    pair.join(clip)
    pair.follow(clip)
    pair.check(**CLOSE)


def test_residuals_of_complex_parameters_are_pairs():
    def make(model):
        return distribute(model, LocalWorld(1).transports[0], sgd(model), mpicomp.TopK(0.1), "allgather")

    model = Spectral()
    optimizer = make(model)
    square(model, 0, 0).backward()
    optimizer.step()
    residual = optimizer.reducer.residual("weight")
    assert residual.shape == (8, 8, 2)
    assert residual.any()
    other = make(Spectral())
    other.load_state_dict(optimizer.state_dict())
    assert np.array_equal(other.reducer.residual("weight"), residual)


def test_a_scaler_of_complex_gradients_is_refused():
    """GradScaler.unscale_ has no kernel for them."""
    with pytest.raises(ConfigurationError, match="takes no complex gradients, and 'weight' is of complex64"):
        distribute(Spectral(), LocalWorld(1).transports[0], scaler=torch.amp.GradScaler("cpu"))
