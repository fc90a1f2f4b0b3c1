"""Seconds of a scheme's own work between rounds, measured without other ranks on short arrays and extrapolated."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Context, Scheme, bind
from mpicomp.compressors.accumulated import TAIL, Accumulated, Piece
from mpicomp.rounds import Group
from mpicomp.transport.local import LocalWorld
from mpicomp.workspace import Workspace

_NUMELS = (1 << 14, 1 << 18)  # squares, which is what a compressor of matrices is measured on
_WARM = 3  # steps before the timed ones, in which thresholds settle
_TIMED = 3  # steps whose median counts


@dataclass(frozen=True)
class Alone:
    """Seconds of a scheme's own work alone, affine in the elements and in those kept.

    Attributes
    ----------
    fixed, per_element, per_kept : float
        Seconds; the last one is 0 where one ratio is all that matters.
    """

    fixed: float
    per_element: float
    per_kept: float = 0.0

    def seconds(self, numel: int, count: int) -> float:
        """Return the seconds for an array of ``numel`` elements of which ``count`` are kept."""
        return self.fixed + numel * self.per_element + count * self.per_kept


def measure_alone(
    scheme: Scheme[Any], other: Scheme[Any] | None, feedback: bool, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Measure a scheme in a world of one rank; return the numbers of `Alone`.

    Parameters
    ----------
    scheme : Scheme
        Its compressor's thresholds settle in the steps that come first.
    other : Scheme or None
        The same with another ratio, for the seconds of what is kept.
    feedback : bool
        Whether there is a residual to be added.
    clock : callable
        Gives seconds. On that of a simulated network own work takes none.
    """
    few, many = _NUMELS
    scheme_few, scheme_many = _bound(scheme, few), _bound(scheme, many)
    short, long = _median(scheme_few, few, feedback, clock), _median(scheme_many, many, feedback, clock)
    per_kept = 0.0
    if other is not None:
        other_many = _bound(other, many)
        counts = [each.compressor.expected(many) for each in (scheme_many, other_many)]
        per_kept = max(0.0, (_median(other_many, many, feedback, clock) - long) / (counts[1] - counts[0]))
        # What a length takes apart from what is kept of it cannot be less than nothing.
        per_kept = min(per_kept, 0.9 * long / counts[0])
        short -= per_kept * scheme_few.compressor.expected(few)
        long -= per_kept * counts[0]
    per_element = max(long - short, 0.1 * long) / (many - few)
    return max(short - few * per_element, 0.0), per_element, per_kept


@functools.lru_cache(maxsize=len(_NUMELS))
def _arrays(numel: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a gradient and a residual, shared and read-only: drawing them takes as long as a measurement."""
    random = np.random.default_rng(0)
    return random.laplace(size=numel).astype(np.float32), random.laplace(size=numel).astype(np.float32)


def _bound(scheme: Scheme[Any], numel: int) -> Scheme[Any]:
    """Return a scheme for one square matrix, without the first steps in which its compressor does something else."""
    side = math.isqrt(numel)
    return bind(scheme.compressor.bind(["gradient"], [numel], [(side, side)], warm_up=False), scheme.id)


def _median(scheme: Scheme[Any], numel: int, feedback: bool, clock: Callable[[], float]) -> float:
    transport = LocalWorld(1).transports[0]
    gradient, residual = _arrays(numel)
    buffer = np.empty(numel + TAIL, np.float32)
    memory: dict[str, Any] = {}
    workspace = Workspace()
    seconds = []
    for step in range(_WARM + _TIMED):
        context = Context(group=Group(0, 1), step=step, memory=memory, workspace=workspace)
        start = clock()
        transport.run(
            scheme.exchange(Accumulated(buffer, residual if feedback else None, [Piece(0, gradient)]), context)
        )
        seconds.append(clock() - start)
    return float(np.median(seconds[_WARM:]))
