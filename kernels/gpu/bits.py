"""Floats seen as integers, and numbers that may be known on the device only."""

from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.compile import library


def word_of(dtype: Any) -> Any:
    """Return the unsigned integer type as wide as float32 or float64."""
    return np.uint32 if np.dtype(dtype) == np.float32 else np.uint64


def on_device(value: Any) -> bool:
    """Return whether a value is a device array, and not a number."""
    return hasattr(value, "dtype") and isinstance(value, library().ndarray)


def given(value: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the two arguments in which kernels take such a number: its address, or 0, and the number.

    Parameters
    ----------
    value : number, or 0-d device array
        Not read here where it is on the device.
    dtype : type
        numpy.int64, numpy.uint64 or numpy.float64: what the kernel reads at the address.
    """
    zero = 0.0 if dtype == np.float64 else 0
    if on_device(value):
        return value.astype(dtype, copy=False), zero
    return 0, float(value) if dtype == np.float64 else int(value)


def magnitude_bits(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the integer that stands for a magnitude in comparisons; see `mpicomp.kernels.cpu.magnitude_bits`.

    Parameters
    ----------
    value : float, or 0-d device array
        A magnitude, at least 0.
    dtype : numpy.dtype
        float32 or float64.

    Returns
    -------
    int, or 0-d device array of uint64
        A device array where ``value`` is one.
    """
    if not on_device(value):
        return cpu.magnitude_bits(value, dtype)
    return value.reshape(1).astype(dtype).view(word_of(dtype)).astype(np.uint64)[0]


def magnitude_of(bits: Any, dtype: np.dtype[Any]) -> Any:
    """Return the magnitude that an integer of `magnitude_bits` stands for; a device array where it is one."""
    if not on_device(bits):
        return cpu.magnitude_of(bits, dtype)
    return bits.reshape(1).astype(word_of(dtype)).view(dtype).astype(np.float64)[0]
