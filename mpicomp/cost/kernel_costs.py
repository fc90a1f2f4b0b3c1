"""Kernel seconds of a scheme between its rounds, measured without other ranks on short arrays and extrapolated.

On a device they include the copies of messages on their way to MPI, as in a step.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Context, Scheme, bind
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.gpu import HOST, Device
from mpicomp.gpu.routes import run_on_device
from mpicomp.mpi.local import LocalWorld
from mpicomp.mpi.rounds import Group
from mpicomp.workspace import Workspace

# Elements of the two measured arrays: squares, since compressors of matrices are measured on square ones.
_HOST_NUMELS = (1 << 14, 1 << 18)
_DEVICE_NUMELS = (1 << 18, 1 << 22)  # shorter ones take as long as their launches
_WARMUP_STEPS = 3  # in which thresholds settle
_TIMED_STEPS = 3  # of which the fastest counts: in the others the rank may have waited for a core


@dataclass(frozen=True)
class KernelCost:
    """Kernel seconds of a scheme without other ranks, affine in the elements and in the kept ones."""

    fixed: float  # seconds, as the others
    per_element: float
    per_kept: float = 0.0  # of a scheme of several ratios

    def seconds(self, numel: int, count: int) -> float:
        """Return the seconds for an array of ``numel`` elements of which ``count`` are kept."""
        return self.fixed + numel * self.per_element + count * self.per_kept


def measure_kernel(
    scheme: Scheme[Any], other: Scheme[Any] | None, feedback: bool, clock: Callable[[], float], device: Device = HOST
) -> tuple[float, float, float]:
    """Measure a scheme in a world of one rank, and ``other`` at a higher ratio; return the numbers of `KernelCost`."""
    few, many = _HOST_NUMELS if device is HOST else _DEVICE_NUMELS
    scheme_few, scheme_many = _bound(scheme, few), _bound(scheme, many)
    short_s = _least_s(scheme_few, few, feedback, clock, device)
    long_s = _least_s(scheme_many, many, feedback, clock, device)
    per_kept = 0.0
    if other is not None:
        other_many = _bound(other, many)
        counts = [bound.compressor.expected(many) for bound in (scheme_many, other_many)]
        other_s = _least_s(other_many, many, feedback, clock, device)
        per_kept = max(0.0, (other_s - long_s) / (counts[1] - counts[0]))
        per_kept = min(per_kept, 0.9 * long_s / counts[0])  # the elements take some of the seconds, too
        short_s -= per_kept * scheme_few.compressor.expected(few)
        long_s -= per_kept * counts[0]
    per_element = max(long_s - short_s, 0.1 * long_s) / (many - few)
    return max(short_s - few * per_element, 0.0), per_element, per_kept


def run_kernels(scheme: Scheme[Any], feedback: bool, device: Device = HOST) -> None:
    """Run the first steps of `measure_kernel`, so that kernels are compiled."""
    few = (_HOST_NUMELS if device is HOST else _DEVICE_NUMELS)[0]
    _step_seconds(_bound(scheme, few), few, feedback, time.perf_counter, device, _WARMUP_STEPS)


@functools.lru_cache(maxsize=len(_HOST_NUMELS + _DEVICE_NUMELS))
def _arrays(numel: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a gradient and a residual, cached and read-only: drawing them takes as long as a measurement."""
    random = np.random.default_rng(0)
    return random.laplace(size=numel).astype(np.float32), random.laplace(size=numel).astype(np.float32)


def _bound(scheme: Scheme[Any], numel: int) -> Scheme[Any]:
    side = math.isqrt(numel)
    return bind(scheme.compressor.bind(["gradient"], [numel], [(side, side)], warm_up=False), scheme.id)


def _least_s(scheme: Scheme[Any], numel: int, feedback: bool, clock: Callable[[], float], device: Device) -> float:
    seconds = _step_seconds(scheme, numel, feedback, clock, device, _WARMUP_STEPS + _TIMED_STEPS)
    return min(seconds[_WARMUP_STEPS:])


def _step_seconds(
    scheme: Scheme[Any], numel: int, feedback: bool, clock: Callable[[], float], device: Device, steps: int
) -> list[float]:
    transport = LocalWorld(1).transports[0]
    gradient, residual = (device.to_device(array) for array in _arrays(numel))
    buffer = device.empty(numel + TRAILER, np.float32)
    memory: dict[str, Any] = {}
    workspace = Workspace(device)
    seconds = []
    for step in range(steps):
        context = Context(group=Group(0, 1), step=step, memory=memory, workspace=workspace)
        device.wait()  # a step begins after the end of the one before
        start = clock()
        accumulated = Accumulated(buffer, residual if feedback else None, [Piece(0, gradient)])
        accumulated.may_be_overwritten = True
        result = transport.run(run_on_device(device, scheme.exchange(accumulated, context)))
        if callable(result.mean):
            with device.active():
                result.mean(buffer[:numel])
        device.wait()
        seconds.append(clock() - start)
    return seconds
