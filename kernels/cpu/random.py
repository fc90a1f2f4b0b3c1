"""Random numbers inside kernels: a hash of a key and an element's index, so that any element's can be had by itself."""

import numpy as np
from mpicomp.kernels.cpu.compile import kernel

# Shifts and odd factors under which each bit of the input changes each of the output in about half of all cases.
_SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(16))
_FACTORS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))

# The same for 64 bits: splitmix64, Steele et al. 2014.
_STEP, _MIXING = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MOST = 0xFFFFFFFFFFFFFFFF


def halves(key: int) -> tuple[np.uint32, np.uint32]:
    """Mix a key of 64 bits and cut it in two, as `draw` takes it: of similar keys the halves have nothing in common.

    Examples
    --------
    >>> [int(half) for half in halves(0)], [int(half) for half in halves(1)]
    ([2065550767, 3793791033], [2298633409, 2433363436])
    """
    word = key + _STEP & _MOST
    for shift, factor in _MIXING:
        word = (word ^ word >> shift) * factor & _MOST
    word ^= word >> 31
    return np.uint32(word & 0xFFFFFFFF), np.uint32(word >> 32)


@kernel
def draw(index, low, high):  # type: ignore[no-untyped-def]
    """Return 32 random bits of an element, the upper ones best; `halves` makes ``low`` and ``high`` from a key.

    Indices that differ by 2**32 have the same bits.
    """
    # Numba would take each result to 64 bits, for which there are half as many lanes and no fast product.
    word = np.uint32(np.uint32(index) ^ low)
    word = np.uint32(word ^ np.uint32(word >> _SHIFTS[0]))
    word = np.uint32(word * _FACTORS[0])
    word = np.uint32(word ^ np.uint32(word >> _SHIFTS[1]))
    word = np.uint32(word ^ high)
    word = np.uint32(word * _FACTORS[1])
    return np.uint32(word ^ np.uint32(word >> _SHIFTS[2]))
