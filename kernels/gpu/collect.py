"""Numbers that lie here and there on the device, put side by side: one copy then brings them all to the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels.gpu.compile import launch, library

MOST = 8  # numbers that one launch collects


def collect(values: Sequence[Any]) -> Any:
    """Copy numbers into the words of one array, in one launch.

    Parameters
    ----------
    values : sequence of 0-d device arrays
        1 to 8 numbers, of bool or of integers or floats of 32 or 64 bits.

    Returns
    -------
    device array of uint64
        A word for each; the bytes of a number are its lowest ones, the others are zero.
    """
    if not 1 <= len(values) <= MOST:
        raise ValueError(f"collect: 1 to {MOST} numbers are taken, got {len(values)}")
    widths = [int(value.dtype.itemsize) for value in values]
    for value, width in zip(values, widths, strict=True):
        if width not in (1, 4, 8) or value.size != 1:
            raise ValueError(f"collect: {value.size} of {value.dtype} are no number of 1, 4 or 8 bytes")
    out = library().empty(len(values), np.uint64)
    nothing = [0] * (MOST - len(values))
    together = sum(width << 8 * place for place, width in enumerate(widths))  # a byte for each
    launch("collect", "collect", np.float32, 1, *values, *nothing, together, len(values), out)
    return out
