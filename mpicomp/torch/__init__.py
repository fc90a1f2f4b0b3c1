"""For PyTorch scripts: an optimizer that averages gradients over MPI ranks before it steps."""

from collections.abc import Callable
from typing import Any

try:
    import torch
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "mpicomp.torch needs PyTorch, which is not installed: pip install 'mpicomp[torch]', or torch by itself for the "
        "build of a GPU",
        name="torch",
    ) from None

from mpicomp.reducer.trace import UNDER_NSIGHT, markers
from mpicomp.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from mpicomp.torch.clipping import clip_grad_norm_
from mpicomp.torch.ddp import DDPState, ddp_comm_hook
from mpicomp.torch.muon import LocalMuon, Muon
from mpicomp.torch.optimizer import DistributedOptimizer
from mpicomp.torch.shards import replicas, shard_mesh
from mpicomp.torch.updates import UpdateOptimizer

__all__ = [
    "DDPState",
    "DistributedOptimizer",
    "LocalMuon",
    "Muon",
    "UpdateOptimizer",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "ddp_comm_hook",
    "replicas",
    "shard_mesh",
]


def _mark_in_profiler(name: str) -> Callable[[], object] | None:
    if not torch.autograd.profiler._is_profiler_enabled:
        return None
    record: Any = torch.profiler.record_function(name)
    record.__enter__()
    return lambda: record.__exit__(None, None, None)


def _mark_in_nvtx(name: str) -> Callable[[], object]:
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push(name)
    return lambda: nvtx.range_pop()


# Without the package nvtx ranges reach Nsight through torch.
if UNDER_NSIGHT and not markers and torch.cuda.is_available():
    markers.append(_mark_in_nvtx)
markers.append(_mark_in_profiler)
