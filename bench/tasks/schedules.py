"""Rates over the steps of a training, as shares of the optimiser's own."""

from __future__ import annotations

import math

_WARM_UP = 0.1  # share of the steps in which the rate rises
_LAST = 0.1  # share of the rate that is left in the last step


def warm_up_and_cosine(step: int, steps: int) -> float:
    """Return the share of the rate in a step: it rises linearly to all of it, and falls on a cosine to a tenth.

    Examples
    --------
    >>> [warm_up_and_cosine(step, 20) for step in (0, 1, 10, 19)]
    [0.5, 1.0, 0.55, 0.1]
    """
    warm_up = max(1, round(_WARM_UP * steps))
    done = min(step + 1, steps)
    if done <= warm_up:
        return done / warm_up
    fallen = (done - warm_up) / (steps - warm_up)
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * fallen)) / 2
