"""Random numbers inside kernels: a hash of a key and an element's index, so that any element's can be had by itself."""

import numpy as np
from mpicomp.kernels.cpu.compile import kernel

# Shifts and odd factors under which each bit of the input changes each of the output in about half of all cases.
_SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(16))
_FACTORS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))


def halves(key: int) -> tuple[np.uint32, np.uint32]:
    """Cut a key of 64 bits into its low and its high half, as `draw` takes it.

    Examples
    --------
    >>> [int(half) for half in halves(5 + 7 * 2**32)]
    [5, 7]
    """
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)


@kernel
def draw(index, low, high):  # type: ignore[no-untyped-def]
    """Give 32 random bits, always the same for the same element and key.

    Parameters
    ----------
    index : int
        Of the element. Those that are 2**32 apart have the same.
    low, high : uint32
        The key.

    Returns
    -------
    uint32
        Its upper bits are the best ones.
    """
    # Numba would take each result to 64 bits, for which there are half as many lanes and no fast product.
    word = np.uint32(np.uint32(index) ^ low)
    word = np.uint32(word ^ np.uint32(word >> _SHIFTS[0]))
    word = np.uint32(word * _FACTORS[0])
    word = np.uint32(word ^ np.uint32(word >> _SHIFTS[1]))
    word = np.uint32(word + high)
    word = np.uint32(word * _FACTORS[1])
    return np.uint32(word ^ np.uint32(word >> _SHIFTS[2]))
