"""Scripts of others and what becomes of them with mpicomp (docs/examples/moving) train the same models."""

import runpy
import sys
import types
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from tests.replicas import gloo

torch = pytest.importorskip("torch")
import mpicomp.torch  # noqa: E402
from mpicomp.torch import DistributedOptimizer  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "moving"
pytestmark = [pytest.mark.mpi(max_size=2), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _dense(monkeypatch):
    """What mpicomp chooses may round, and here sums are compared."""
    monkeypatch.setattr(mpicomp.torch, "DistributedOptimizer", partial(DistributedOptimizer, compressor="dense"))


def trained(monkeypatch, name):
    monkeypatch.syspath_prepend(FOLDER)
    torch.manual_seed(0)  # models of all ranks are equal, also where nothing broadcasts them
    model, loss = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), loss


def assert_same(comm, before, after, atol):
    assert all(torch.equal(after[0], other) for other in comm.allgather(after[0]))
    assert torch.allclose(before[0], after[0], rtol=0, atol=atol)
    assert after[1] == pytest.approx(before[1], rel=0.02)


def horovod(comm):
    """Return the names of Horovod that the script takes, over MPI and without compression."""
    module = types.ModuleType("horovod.torch")

    class Optimizer:
        def __init__(self, optimizer, named_parameters, compression):
            self.optimizer, self.parameters = optimizer, [parameter for _, parameter in named_parameters]
            self.zero_grad = optimizer.zero_grad
            self.skip_synchronize = nullcontext

        def synchronize(self):
            for parameter in self.parameters:
                parameter.grad = module.allreduce(parameter.grad, "gradient")

        def step(self):
            self.optimizer.step()

    def broadcast_parameters(state, root_rank):
        for tensor in state.values():
            tensor.copy_(comm.bcast(tensor, root_rank))

    module.init = lambda: None
    module.rank, module.size = lambda: comm.rank, lambda: comm.size
    module.broadcast_parameters = broadcast_parameters
    module.broadcast_optimizer_state = lambda optimizer, root_rank: None  # it has none yet
    module.allreduce = lambda tensor, name: torch.stack(comm.allgather(tensor)).mean(0)
    module.Compression = types.SimpleNamespace(fp16=None)
    module.DistributedOptimizer = Optimizer
    return module


def test_script_from_horovod_trains_the_same(comm, monkeypatch):
    module = horovod(comm)
    monkeypatch.setitem(sys.modules, "horovod", types.SimpleNamespace(torch=module))
    monkeypatch.setitem(sys.modules, "horovod.torch", module)
    before, after = trained(monkeypatch, "horovod_before"), trained(monkeypatch, "horovod_after")
    assert_same(comm, before, after, 1e-5)


def trained_by_ddp(comm, monkeypatch, name):
    with gloo(comm), monkeypatch.context() as patches:
        patches.setattr(torch.distributed, "init_process_group", lambda backend: None)  # it is there
        patches.setattr(torch.distributed, "destroy_process_group", lambda: None)
        return trained(patches, name)


def test_script_from_ddp_trains_the_same(comm, monkeypatch):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    with monkeypatch.context() as patches:
        patches.setattr(default_hooks, "fp16_compress_hook", default_hooks.allreduce_hook)  # without its rounding
        before = trained_by_ddp(comm, monkeypatch, "ddp_before")
    assert_same(comm, before, trained(monkeypatch, "ddp_after"), 1e-5)
