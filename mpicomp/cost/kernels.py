"""Seconds of a scheme's own work between rounds, measured without other ranks on short arrays and extrapolated.

On a device the copies of messages on their way to MPI are a part of it, as they are in steps.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Context, Scheme, bind
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece
from mpicomp.places import HOST, Place
from mpicomp.rounds import Group
from mpicomp.transport.local import LocalWorld
from mpicomp.transport.routes import at
from mpicomp.workspace import Workspace

# Squares, which is what a compressor of matrices is measured on.
_ON_HOST = (1 << 14, 1 << 18)
_ON_DEVICE = (1 << 18, 1 << 22)  # there the shorter ones of the host take as long as launches do
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
    scheme: Scheme[Any], other: Scheme[Any] | None, feedback: bool, clock: Callable[[], float], place: Place = HOST
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
    place : Place
        Where it works.
    """
    few, many = _ON_HOST if place is HOST else _ON_DEVICE
    scheme_few, scheme_many = _bound(scheme, few), _bound(scheme, many)
    short, long = _median(scheme_few, few, feedback, clock, place), _median(scheme_many, many, feedback, clock, place)
    per_kept = 0.0
    if other is not None:
        other_many = _bound(other, many)
        counts = [each.compressor.expected(many) for each in (scheme_many, other_many)]
        per_kept = max(0.0, (_median(other_many, many, feedback, clock, place) - long) / (counts[1] - counts[0]))
        # What a length takes apart from what is kept of it cannot be less than nothing.
        per_kept = min(per_kept, 0.9 * long / counts[0])
        short -= per_kept * scheme_few.compressor.expected(few)
        long -= per_kept * counts[0]
    per_element = max(long - short, 0.1 * long) / (many - few)
    return max(short - few * per_element, 0.0), per_element, per_kept


@functools.lru_cache(maxsize=len(_ON_HOST + _ON_DEVICE))
def _arrays(numel: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a gradient and a residual, shared and read-only: drawing them takes as long as a measurement."""
    random = np.random.default_rng(0)
    return random.laplace(size=numel).astype(np.float32), random.laplace(size=numel).astype(np.float32)


def _bound(scheme: Scheme[Any], numel: int) -> Scheme[Any]:
    """Return a scheme for one square matrix, without the first steps in which its compressor does something else."""
    side = math.isqrt(numel)
    return bind(scheme.compressor.bind(["gradient"], [numel], [(side, side)], warm_up=False), scheme.id)


def _median(scheme: Scheme[Any], numel: int, feedback: bool, clock: Callable[[], float], place: Place) -> float:
    transport = LocalWorld(1).transports[0]
    gradient, residual = (place.bring(own) for own in _arrays(numel))
    buffer = place.empty(numel + TRAILER, np.float32)
    memory: dict[str, Any] = {}
    workspace = Workspace(place)
    seconds = []
    for step in range(_WARM + _TIMED):
        context = Context(group=Group(0, 1), step=step, memory=memory, workspace=workspace)
        place.wait()  # a step begins when the one before is over
        start = clock()
        accumulated = GradientWithResidual(buffer, residual if feedback else None, [Piece(0, gradient)])
        transport.run(at(place, scheme.exchange(accumulated, context)))
        place.wait()
        seconds.append(clock() - start)
    return float(np.median(seconds[_WARM:]))
