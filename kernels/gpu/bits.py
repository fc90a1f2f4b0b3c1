"""Floats as integers, and scalar arguments that may be known on the device only."""

from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.compile import library, twin_of


def word_of(dtype: Any) -> Any:
    """Return the unsigned integer type as wide as float32 or float64."""
    return np.uint32 if np.dtype(dtype) == np.float32 else np.uint64


def on_device(value: Any) -> bool:
    """Return whether a value is a device array, and not a number."""
    return hasattr(value, "dtype") and isinstance(value, library().ndarray)


def scalar_arg(value: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the two arguments by which kernels take a scalar: its address, or 0, and the number.

    ``dtype`` is the type that the kernel reads at the address: numpy.int64, numpy.uint64 or numpy.float64.
    """
    zero = 0.0 if dtype == np.float64 else 0
    if on_device(value):
        return value.astype(dtype, copy=False), zero
    return 0, float(value) if dtype == np.float64 else int(value)


@twin_of(cpu.magnitude_bits)
def magnitude_bits(value, dtype):
    if not on_device(value):
        return cpu.magnitude_bits(value, dtype)
    return value.reshape(1).astype(dtype).view(word_of(dtype)).astype(np.uint64)[0]


@twin_of(cpu.magnitude_of)
def magnitude_of(bits, dtype):
    if not on_device(bits):
        return cpu.magnitude_of(bits, dtype)
    return bits.reshape(1).astype(word_of(dtype)).view(dtype).astype(np.float64)[0]
