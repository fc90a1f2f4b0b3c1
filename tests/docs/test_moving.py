"""Scripts of others and what becomes of them with mpicomp (docs/examples/moving) train the same models."""

import gc
import os
import re
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


# A script of nanoGPT's shape, in which {part} stands where a part of nanogpt.diff is.
NANOGPT = """
import os
from contextlib import nullcontext
import torch
{imports}
device, backend, gradient_accumulation_steps = 'cpu', 'gloo', 6
{ranks}
    seed_offset = ddp_rank
    gradient_accumulation_steps //= ddp_world_size
else:
    seed_offset = 0
torch.manual_seed(seed_offset)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
scaler = torch.amp.GradScaler('cpu', enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
{optimizer}
{model}
{loop}
random = torch.Generator().manual_seed(1)
X, Y = torch.randn(60, 6, 4, generator=random), torch.randn(60, 6, 2, generator=random)
for iter_num in range(10):
    first = 6 * iter_num + seed_offset * gradient_accumulation_steps
    for micro_step in range(gradient_accumulation_steps):
{backward}
        loss = torch.nn.functional.mse_loss(model(X[first + micro_step]), Y[first + micro_step])
        loss = loss / gradient_accumulation_steps
{accumulation}
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
{end}
trained = torch.cat([parameter.detach().flatten() for parameter in raw_model.parameters()])
"""


def parts_of_nanogpt(signs):
    """Return the lines of each part of the diff that begin with one of the signs."""
    diff = (FOLDER / "nanogpt.diff").read_text()
    parts = re.findall(r"^@@ (\w+)\n((?:[ +-].*\n)+)", diff, flags=re.MULTILINE)
    return {name: "\n".join(line[1:] for line in part.splitlines() if line[0] in signs) for name, part in parts}


def test_diff_of_nanogpt_trains_like_one_process(comm, monkeypatch):
    monkeypatch.delitem(os.environ, "RANK", raising=False)
    # The script as it is, in each process alone, and with mpicomp.
    results = []
    for signs in (" -", " +"):
        names = {}
        exec(NANOGPT.format(**parts_of_nanogpt(signs)), names)
        results.append(names["trained"])
    assert all(torch.equal(results[1], other) for other in comm.allgather(results[1]))
    assert torch.allclose(*results, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchft's code
def test_script_from_torchft_trains_the_same(comm, monkeypatch):
    monkeypatch.setitem(os.environ, "RUST_LOG", "error")  # or each exchange writes ten lines
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=comm.size) if comm.rank == 0 else None
    port = comm.bcast(lighthouse.address().rsplit(":", 1)[1] if lighthouse else None)
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    variables = {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "RANK": "0", "WORLD_SIZE": "1", "REPLICA_GROUP_ID": str(comm.rank), "NUM_REPLICA_GROUPS": str(comm.size),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    before = trained(monkeypatch, "diloco_before")
    after = trained(monkeypatch, "diloco_after")
    assert_same(comm, before, after, 1e-4)
    if lighthouse is not None:
        lighthouse.shutdown()
    gc.collect()  # sockets that torchft leaves open, while their warnings are ignored
