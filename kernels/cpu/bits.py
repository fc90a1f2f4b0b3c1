"""Floats seen as integers, so that magnitudes can be compared without rounding; and random bits.

Random bits are a hash of a key and the index of an element, so that those of each element can be had alone.
"""

import math
import struct
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.compile import Floats, kernel
from numpy.typing import NDArray

_INTEGER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.uint64),
}

MASKS = {dtype: integer.type(np.iinfo(integer).max >> 1) for dtype, integer in _INTEGER.items()}
# One number is packed by struct: an array for it would take longer than most kernels do on short arrays.
_PACKED = {
    np.dtype(np.float32): (struct.Struct("=f"), struct.Struct("=I")),
    np.dtype(np.float64): (struct.Struct("=d"), struct.Struct("=Q")),
}

# Shifts and odd factors under which each bit of the input changes each of the output in about half of all cases.
_SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(16))
_FACTORS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))

# The same for 64 bits: splitmix64, Steele et al. 2014.
_STEP, _MIXING = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_ALL_BITS = 0xFFFFFFFFFFFFFFFF


def as_bits(array: Floats) -> NDArray[Any]:
    """View a contiguous float32 or float64 array as unsigned integers of the same width, sign included."""
    return array.view(_INTEGER[array.dtype])


def magnitude_bits(value: float, dtype: np.dtype[Any]) -> int:
    """Return the integer that stands for a magnitude, at least 0, in comparisons: its bits in ``dtype``."""
    number, integer = _PACKED[dtype]
    try:
        packed = number.pack(value)
    except OverflowError:  # beyond the largest number stands infinity
        packed = number.pack(math.inf)
    return int(integer.unpack(packed)[0])


def magnitude_of(bits: int, dtype: np.dtype[Any]) -> float:
    """Return the magnitude that an integer of `magnitude_bits` stands for."""
    number, integer = _PACKED[dtype]
    return float(number.unpack(integer.pack(bits))[0])


def mask_of(dtype: np.dtype[Any]) -> Any:
    """Return the integer that takes the sign away from the bits of a float of ``dtype``."""
    return MASKS[dtype]


def infinity_of(dtype: np.dtype[Any]) -> int:
    """Return the magnitude bits of infinity: elements that reach them are infinite or NaN."""
    return magnitude_bits(np.inf, dtype)


def halves(key: int) -> tuple[np.uint32, np.uint32]:
    """Mix a key of 64 bits and cut it in two, as `draw` takes it: of similar keys the halves have nothing in common.

    >>> [int(half) for half in halves(0)], [int(half) for half in halves(1)]
    ([2065550767, 3793791033], [2298633409, 2433363436])
    """
    word = key + _STEP & _ALL_BITS
    for shift, factor in _MIXING:
        word = (word ^ word >> shift) * factor & _ALL_BITS
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
