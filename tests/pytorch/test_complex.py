"""Complex parameters, which are exchanged as pairs of reals."""

import numpy as np
import pytest
import torch
from replicas import Reference, adam, assert_replicas, assert_same, descent, distribute, gloo, square, train

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


class Spectral(torch.nn.Module):
    """Complex factors between real layers; backward leaves a gradient of ``turned`` that is conjugated lazily."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.enter, self.leave = torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)
        self.weight = torch.nn.Parameter(torch.randn((8, 8), dtype=torch.complex64))
        self.turned = torch.nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, inputs):
        hidden = torch.tanh(self.enter(inputs)).to(self.weight.dtype)
        return self.leave((hidden @ self.weight + self.turned.conj()).abs().float())


MAKES = {
    "overlap": (adam, lambda model, comm: distribute(model, comm, adam(model), overlap=True)),
    "later": (adam, lambda model, comm: distribute(model, comm, adam(model), overlap=False)),
    "updates": (descent, lambda m, comm: mpicomp.torch.UpdateOptimizer(descent(m), m, 1, "dense", comm=comm)),
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("plain", "wrapped"), MAKES.values(), ids=MAKES)
def test_complex_gradients_and_updates_are_averaged(comm, plain, wrapped):
    model = Spectral()
    reference, optimizer = Reference(model, plain, comm.size), wrapped(model, comm)
    for step in range(5):
        train(model, optimizer, [step], comm.rank)
        reference.step(square, step)
    assert_same(model, reference, **CLOSE)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_buckets_of_complex_gradients_are_averaged(comm):
    with gloo(comm):
        plain = Spectral()
        reference = Reference(plain, descent, comm.size)
        model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
        state = mpicomp.torch.DDPState(model, "dense", "allreduce", comm=comm)
        model.register_comm_hook(state, mpicomp.torch.ddp_comm_hook)
        optimizer = descent(model)
        for step in range(4):
            train(model, optimizer, [step], comm.rank)
            reference.step(square, step)
        assert_same(plain, reference, **CLOSE)
        state.close()


def test_residuals_of_complex_parameters_are_pairs():
    model, end = Spectral(), LocalWorld(1).transports[0]
    optimizer = distribute(model, end, descent(model), mpicomp.TopK(0.1), "allgather")
    train(model, optimizer, [0], 0)
    residual = optimizer.reducer.residual("weight")
    assert residual.shape == (8, 8, 2)
    assert residual.any()
    optimizer.load_state_dict(optimizer.state_dict())
    assert np.array_equal(optimizer.reducer.residual("weight"), residual)
    with pytest.raises(ConfigurationError, match="takes no complex gradients, and 'weight' is of complex64"):
        distribute(Spectral(), end, scaler=torch.amp.GradScaler("cpu"))
