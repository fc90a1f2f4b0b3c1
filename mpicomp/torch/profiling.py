"""Phases of an exchange as ranges of torch's profiler, and of NVTX by torch where the package nvtx is not there."""

from collections.abc import Callable
from typing import Any

import torch

from mpicomp.reducer.ranges import UNDER_NSIGHT, markers


def _in_profiler(name: str) -> Callable[[], object] | None:
    """Begin a range where torch's profiler runs; it says which threads it looks at."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return None
    shown: Any = torch.profiler.record_function(name)
    shown.__enter__()
    return lambda: shown.__exit__(None, None, None)


def _in_nvtx(name: str) -> Callable[[], object]:
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push(name)
    return lambda: nvtx.range_pop()


def show_ranges() -> None:
    """Show ranges from now on; a second call does nothing."""
    nvtx = UNDER_NSIGHT and not markers and torch.cuda.is_available()
    if _in_profiler not in markers:
        markers.append(_in_profiler)
        if nvtx:
            markers.append(_in_nvtx)
