"""The clock that everything is timed with."""

import time

import numpy as np

_READINGS = 1000  # readings of the clock, of which its resolution and its cost are taken


def clock() -> tuple[float, float]:
    """Return the clock's resolution and the seconds of timing nothing; both measured."""
    readings = [time.perf_counter() for _ in range(_READINGS)]
    steps = np.diff(readings)
    empty = []
    for _ in range(_READINGS):
        start = time.perf_counter()
        empty.append(time.perf_counter() - start)
    return float(steps[steps > 0].min()), float(np.median(empty))
