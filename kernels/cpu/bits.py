"""Floats seen as integers, so that magnitudes can be compared, binned and checked without rounding."""

import math
import struct
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.compile import Floats
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
