"""Kernels for moments of an array's magnitudes: counts, sums of magnitudes, of squares and of logarithms."""

from typing import NamedTuple

import numpy as np
from mpicomp.kernels.cpu.compile import Floats, cut, kernel, spread

# Sums over a block are taken in the array's dtype; where the sum of squares leaves this range they are taken again
# in float64, since squares may have vanished or overflowed.
MIN_ENERGY = 1e-25
MAX_ENERGY = 1e30

_BLOCK = 1024  # elements that are summed in the array's dtype

# For the logarithm of a float32: where its fraction is cut, how subnormal numbers are lifted, and the polynomial.
_MIDDLE = np.uint32(0x3F3504F3)  # bits of 1/sqrt(2)
_NORMAL = np.float32(2.0**-126)
_LIFT = np.float32(2.0**24)
_LIFTED = np.float32(24)
_C0 = np.float32(1.4426964325502474)
_C1 = np.float32(-0.721364044787846)
_C2 = np.float32(0.48062910426637556)
_C3 = np.float32(-0.35935037934710556)
_C4 = np.float32(0.2956341050474946)
_C5 = np.float32(-0.26950934436144314)
_C6 = np.float32(0.17213074690974067)


class Moments(NamedTuple):
    """Moments of an array's magnitudes from one sweep; sums over blocks are in float64."""

    nonzero: int  # elements that are not zero
    total: float  # sum of magnitudes
    energy: float  # sum of squares
    finite: bool  # whether no element is infinite or NaN

    def __add__(self, other: "Moments") -> "Moments":  # type: ignore[override]
        """Return the moments of two arrays as of one."""
        return Moments(
            self.nonzero + other.nonzero,
            self.total + other.total,
            self.energy + other.energy,
            self.finite & other.finite,
        )


def logarithms(array: Floats, stride: int = 1, threads: int = 1) -> tuple[int, float, float]:
    """Return the number of nonzero elements, and the sums of their magnitudes and of the natural logarithms of these.

    The array is finite. With a stride s every s-th group of 1024 elements is swept; sums are not scaled up. Sums of
    float32 are good to about 1e-6 of their terms.
    """
    parts = spread(lambda part: _logarithms(array[part], stride), strided(array.size, stride, threads))
    return sum(int(part[0]) for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts)


def strided(size: int, stride: int, threads: int, group: int = _BLOCK) -> list[slice]:
    """Cut an array for threads where a group of elements begins that is looked at."""
    length = group * stride
    groups = -(-size // length)
    starts = [part.start // group for part in cut(groups * group, threads)]
    return [slice(a * length, b * length) for a, b in zip(starts, [*starts[1:], groups], strict=True)]


@kernel
def _sums(array):  # type: ignore[no-untyped-def]
    total, energy = 0.0, 0.0
    for i in range(array.size):
        value = np.float64(array[i])
        total += abs(value)
        energy += value * value
    return total, energy


@kernel
def _logarithm64(array):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(array.size):
        if array[i] != 0:
            total += np.log(abs(array[i]))
    return total


@kernel
def _logarithm32(array):  # type: ignore[no-untyped-def]
    # By the exponent and a polynomial for log2(1 + x) / x between 1/sqrt(2) and sqrt(2), which is off by
    # at most 6e-7 and, unlike a call for each element, vectorises.
    total = np.float32(0)
    for i in range(array.size):
        value = np.float32(abs(array[i]))
        small = value < _NORMAL
        bits = np.float32(value * _LIFT if small else value).view(np.uint32)
        power = np.uint32(bits - _MIDDLE) >> np.uint32(23)  # of two, and counted round the clock
        rest = np.uint32(bits - np.uint32(power << np.uint32(23))).view(np.float32) - np.float32(1)
        series = _C6
        series = series * rest + _C5
        series = series * rest + _C4
        series = series * rest + _C3
        series = series * rest + _C2
        series = series * rest + _C1
        series = series * rest + _C0
        exponent = np.float32(np.int32(power << np.uint32(23)) >> np.int32(23))
        if small:
            exponent -= _LIFTED
        total += series * rest + exponent if value != 0 else np.float32(0)
    return np.float64(total) * 0.6931471805599453


@kernel
def _logarithms(array, stride):  # type: ignore[no-untyped-def]
    nonzero, total, logarithm = 0, 0.0, 0.0
    for start in range(0, array.size, _BLOCK * stride):
        block = array[start : start + _BLOCK]
        for i in range(block.size):
            nonzero += block[i] != 0
        total += _sums(block)[0]
        logarithm += _logarithm64(block) if array.itemsize == 8 else _logarithm32(block)
    return nonzero, total, logarithm
