"""Complex parameters, which are exchanged as pairs of reals."""

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError

torch = pytest.importorskip("torch")

from replicas import Reference, assert_replicas, assert_same, batch, distribute  # noqa: E402

torch.set_num_threads(1)


def network(dtype=torch.complex64):
    """A complex layer between real ones; backward leaves a gradient of the last factor that is conjugated lazily."""
    torch.manual_seed(5)
    return Spectral(dtype)


class Spectral(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.enter = torch.nn.Linear(6, 8)
        self.middle = torch.nn.Linear(8, 8, dtype=dtype)
        self.factor = torch.nn.Parameter(torch.randn(8, dtype=dtype))
        self.turned = torch.nn.Parameter(torch.randn(8, dtype=dtype))
        self.leave = torch.nn.Linear(8, 2)

    def forward(self, inputs):
        hidden = self.middle(torch.tanh(self.enter(inputs)).to(self.factor.dtype)) * self.factor
        return self.leave((hidden + self.turned.conj()).abs().float())


def square(model, step, rank):
    return model(batch(step, rank)).square().mean()


class InPairs(Reference):
    """Averages pairs of reals."""

    def gradients(self, loss):
        total = {}
        for rank in range(self.ranks):
            self.model.zero_grad(set_to_none=True)
            loss(self.model, rank).backward()
            for name, parameter in self.model.named_parameters():
                wide = np.complex128 if parameter.is_complex() else np.float64
                total[name] = total.get(name, 0) + parameter.grad.resolve_conj().numpy().astype(wide)
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.from_numpy(total[name] / self.ranks).to(parameter.dtype)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_distributed_optimizer_averages_complex_gradients(comm, overlap, dtype):
    model = network(dtype)
    reference = InPairs(model, adam, comm.size)
    optimizer = distribute(model, comm, adam(model), overlap=overlap)
    for step in range(5):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
        assert_same(model, reference, rtol=2e-4, atol=2e-5)
    assert_replicas(model, comm)
    optimizer.close()
