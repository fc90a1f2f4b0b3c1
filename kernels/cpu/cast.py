"""16-bit wires: rounding to nearest even, saturating, and their rounding errors.

A finite value beyond the largest 16-bit number becomes that number, so that error feedback can send the
rest later; infinity and NaN are unchanged.
"""

import numpy as np
from mpicomp.kernels.cpu.compile import Floats, kernel
from numpy.typing import NDArray


def narrow(array: Floats, wire: str, out: NDArray[np.uint16], sent: Floats | None = None) -> float:
    """Round to 16 bits, "fp16" or "bf16", stored as integers; return the squared L2 norm of ``array - sent``.

    ``sent`` receives the numbers that the receiver will see, in the dtype of ``array``.
    """
    return float(_narrow(array, out, sent, _BF16[wire]))


def widen(source: NDArray[np.uint16], wire: str, out: Floats) -> None:
    """Write 16-bit numbers, stored as integers, to a float32 or float64 array of the same length."""
    _widen(source, out, _BF16[wire], None)


def widen_add(source: NDArray[np.uint16], wire: str, out: Floats) -> None:
    """Add 16-bit numbers, stored as integers, to a float32 or float64 array of the same length."""
    _widen(source, out, _BF16[wire], True)


_BF16 = {"fp16": None, "bf16": True}  # Numba compiles a kernel for None, and one for a boolean

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)  # of float32
_LARGEST = np.float32(np.finfo(np.float32).max)
_NORMAL = np.uint32(113 << 23)  # float32 bits of 2**-14, the smallest normal half
_SHIFT_IN = np.float32(2.0**112)  # between the exponent biases of half and float32
_HALF = np.float32(0.5)  # adding it rounds to a multiple of 2**-24, the step of subnormal halves
_SUBNORMAL = np.uint32(126 << 23)  # its float32 bits


@kernel
def _to_float32(value):  # type: ignore[no-untyped-def]
    single = np.float32(value)
    if np.isinf(single) and not np.isinf(value):  # a float64 beyond float32
        single = np.float32(np.copysign(_LARGEST, single))
    return single


@kernel
def _bf16_of(single):  # type: ignore[no-untyped-def]
    bits = np.float32(single).view(np.uint32)
    magnitude = bits & ~_SIGN
    half = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if magnitude > _INFINITY:
        half = (bits >> np.uint32(16)) | np.uint32(0x40)  # a NaN keeps a bit of its fraction
    elif magnitude < _INFINITY and (half & np.uint32(0x7FFF)) == np.uint32(0x7F80):
        half -= np.uint32(1)  # rounding went up to infinity
    return np.uint16(half)


@kernel
def _float32_of_bf16(half):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@kernel
def _fp16_of(single):  # type: ignore[no-untyped-def]
    bits = np.float32(single).view(np.uint32)
    magnitude = np.uint32(bits & ~_SIGN)
    if magnitude >= _INFINITY:
        half = np.uint32(0x7E00) if magnitude > _INFINITY else np.uint32(0x7C00)
    elif magnitude < _NORMAL:
        moved = np.uint32(magnitude).view(np.float32) + _HALF
        half = np.uint32(np.float32(moved).view(np.uint32) - _SUBNORMAL)
    else:
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        half = np.uint32((magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13))
        half = min(half, np.uint32(0x7BFF))
    return np.uint16(half | ((bits & _SIGN) >> np.uint32(16)))


@kernel
def _float32_of_fp16(half):  # type: ignore[no-untyped-def]
    wide = np.uint32(half)
    magnitude = np.uint32((wide & np.uint32(0x7FFF)) << np.uint32(13))
    if magnitude >= np.uint32(0x7C00 << 13):
        bits = magnitude | _INFINITY
    else:
        # Taken as a float32 the shifted bits are too small by the difference of the biases, subnormals too.
        bits = np.float32(np.uint32(magnitude).view(np.float32) * _SHIFT_IN).view(np.uint32)
    return np.uint32(bits | ((wide & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@kernel
def _float32_of(half, bf16):  # type: ignore[no-untyped-def]
    return _float32_of_fp16(half) if bf16 is None else _float32_of_bf16(half)


@kernel
def _narrow(array, out, sent, bf16):  # type: ignore[no-untyped-def]
    lost = 0.0
    for i in range(array.size):
        single = _to_float32(array[i])
        out[i] = _fp16_of(single) if bf16 is None else _bf16_of(single)
        wide = _float32_of(out[i], bf16)
        if sent is not None:
            sent[i] = wide
        error = np.float64(array[i]) - np.float64(wide)
        lost += error * error
    return lost


@kernel
def _widen(source, out, bf16, add):  # type: ignore[no-untyped-def]
    for i in range(source.size):
        wide = _float32_of(source[i], bf16)
        out[i] = wide if add is None else out[i] + wide
