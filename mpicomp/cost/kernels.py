"""What schemes do themselves, between rounds: measured alone, on short arrays, and taken to grow with their length."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpicomp.collectives import Context, Group, Scheme
from mpicomp.compressors.accumulated import TAIL, Accumulated, Piece
from mpicomp.transport.local import LocalWorld
from mpicomp.workspace import Workspace

_NUMELS = (1 << 14, 1 << 18)
_WARM, _TIMED = 3, 3  # steps


def seconds_alone(scheme: Scheme[Any], feedback: bool, clock: Callable[[], float]) -> tuple[float, float]:
    """Measure a scheme in a world of one rank.

    Parameters
    ----------
    scheme : Scheme
        Its compressor's thresholds settle in the steps that come first.
    feedback : bool
        Whether there is a residual to be added.
    clock : callable
        Gives seconds. On that of a simulated network own work takes none.

    Returns
    -------
    fixed, per_element : float
        Seconds.
    """
    few, many = _NUMELS
    short, long = (_median(scheme, numel, feedback, clock) for numel in _NUMELS)
    per_element = max(long - short, 0.1 * long) / (many - few)
    return max(short - few * per_element, 0.0), per_element


def _median(scheme: Scheme[Any], numel: int, feedback: bool, clock: Callable[[], float]) -> float:
    transport = LocalWorld(1).transports[0]
    random = np.random.default_rng(0)
    gradient = random.laplace(size=numel).astype(np.float32)
    residual = random.laplace(size=numel).astype(np.float32) if feedback else None
    buffer = np.empty(numel + TAIL, np.float32)
    memory: dict[str, Any] = {}
    workspace = Workspace()
    seconds = []
    for step in range(_WARM + _TIMED):
        context = Context(group=Group(0, 1), step=step, memory=memory, workspace=workspace)
        start = clock()
        transport.run(scheme.exchange(Accumulated(buffer, residual, [Piece(0, gradient)]), context))
        seconds.append(clock() - start)
    return float(np.median(seconds[_WARM:]))
