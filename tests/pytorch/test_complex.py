"""Complex parameters, which are exchanged as pairs of reals."""

import numpy as np
import pytest
import torch
from replicas import Reference, adam, assert_replicas, assert_same, descent, distribute, gloo, square, train

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


class Spectral(torch.nn.Module):
    """Complex factors between real layers; backward leaves a gradient of ``turned`` that is conjugated lazily."""

    def __init__(self, dtype=torch.complex64):
        super().__init__()
        torch.manual_seed(5)
        self.enter, self.leave = torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)
        self.weight = torch.nn.Parameter(torch.randn((8, 8), dtype=dtype))
        self.turned = torch.nn.Parameter(torch.randn(8, dtype=dtype))

    def forward(self, inputs):
        hidden = torch.tanh(self.enter(inputs)).to(self.weight.dtype)
        return self.leave((hidden @ self.weight + self.turned.conj()).abs().float())


def sgd(model):
    return descent(model, lr=0.05)


def updating(model, comm, optimizer, *settings, **more):
    return mpicomp.torch.UpdateOptimizer(optimizer, model, *settings, comm=comm, **more)


MAKES = {
    "overlap": (adam, lambda model, comm: distribute(model, comm, adam(model), overlap=True)),
    "later": (adam, lambda model, comm: distribute(model, comm, adam(model), overlap=False)),
    "updates": (sgd, lambda model, comm: updating(model, comm, sgd(model), 1, "dense")),
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("make", "dtype"),
    [("overlap", torch.complex64), ("later", torch.complex128), ("updates", torch.complex64)],
)
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
