"""Error feedback: gradient plus residual, in the sweep that also finds what a selection needs to know."""

from typing import NamedTuple

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, infinity_of, mask_of
from mpicomp.kernels.cpu.compile import kernel
from mpicomp.kernels.cpu.lanes import LANES, at_least, trailing_zeros
from mpicomp.kernels.cpu.threads import cut, spread
from numpy.typing import NDArray

_BLOCK = 1024  # elements that are swept again while they are in the first-level cache

# Sums over a block are taken in the array's own type; where the sum of squares leaves this range they are taken again
# in float64, since squares may have vanished or overflowed.
_LEAST = 1e-25
_MOST = 1e30

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
    """What one sweep tells of an array's magnitudes; sums over blocks are in float64."""

    nonzero: int
    """Elements that are not zero."""
    total: float
    """Sum of magnitudes."""
    energy: float
    """Sum of squares."""
    logarithm: float
    """Sum of natural logarithms of the magnitudes that are not zero; NaN where it was not asked for."""
    finite: bool
    """Whether no element is infinite or NaN."""

    def __add__(self, other: "Moments") -> "Moments":  # type: ignore[override]
        """Give the moments of two arrays taken together."""
        return Moments(
            self.nonzero + other.nonzero,
            self.total + other.total,
            self.energy + other.energy,
            self.logarithm + other.logarithm,
            self.finite and other.finite,
        )


def accumulate(
    gradient: NDArray[np.floating],
    residual: NDArray[np.floating] | None,
    out: NDArray[np.floating],
    logarithms: bool = False,
    threads: int = 1,
) -> Moments:
    """Write ``gradient + residual`` to ``out``, in one sweep.

    Parameters
    ----------
    gradient : array, shape (n,)
        float32 or float64, contiguous. It may be ``out`` itself.
    residual : array, shape (n,), or None
        Of the same dtype. None stands for zeros: the gradient is copied.
    out : array, shape (n,)
        Where the sum goes; of the same dtype.
    logarithms : bool
        Whether to sum logarithms too.
    threads : int
        How many threads share the sweep.

    Returns
    -------
    Moments
        Of ``out``.

    Examples
    --------
    >>> import numpy as np
    >>> out = np.empty(2, np.float32)
    >>> moments = accumulate(np.array([1, 2], np.float32), np.array([2, 2], np.float32), out)
    >>> out.tolist(), moments.energy, moments.finite
    ([3.0, 4.0], 25.0, True)
    """
    mask = mask_of(out.dtype)
    bits = as_bits(out)

    def sweep(part: slice) -> Moments:
        second = None if residual is None else residual[part]
        nothing = bits[:0]
        sums = _accumulate(gradient[part], second, out[part], bits[part], mask, logarithms, None, 0, nothing, nothing)
        return _moments(sums, logarithms, out[part])

    first, *others = spread(sweep, cut(out.size, threads))
    return sum(others, first)


def accumulate_candidates(
    gradient: NDArray[np.floating],
    residual: NDArray[np.floating] | None,
    out: NDArray[np.floating],
    bound: int,
    base: int,
    index: NDArray[np.uint32],
    bits: NDArray[np.unsignedinteger],
    count: int,
    logarithms: bool = False,
    threads: int = 1,
) -> tuple[int, Moments]:
    """Do what `accumulate` does and list the elements of at least a given magnitude, in the same sweep.

    Parameters
    ----------
    gradient, residual, out, logarithms, threads
        As in `accumulate`.
    bound : int
        Magnitude bits; elements at or above it are candidates.
    base : int
        What is added to a position in ``out`` to make the candidate's index: where this piece of a bucket starts.
    index : array of uint32
        Indices of the candidates, ascending, appended from ``count`` on.
    bits : array of uint32 or uint64
        Their magnitude bits.
    count : int
        Candidates that are there already.

    Returns
    -------
    count : int
        Candidates found so far. A count above ``index.size`` means that some were not stored.
    moments : Moments
        Of ``out``.
    """
    mask = mask_of(out.dtype)
    limit = mask.dtype.type(bound)
    words = as_bits(out)
    parts = cut(out.size, threads)
    room = max(0, index.size - count)
    rooms = [slice(count + room * p // len(parts), count + room * (p + 1) // len(parts)) for p in range(len(parts))]

    def sweep(part: slice) -> tuple[int, Moments]:
        second = None if residual is None else residual[part]
        own = rooms[parts.index(part)]
        target, place = out[part], base + part.start
        sums = _accumulate(
            gradient[part], second, target, words[part], mask, logarithms, limit, place, index[own], bits[own]
        )
        return int(sums[0]), _moments(sums, logarithms, target)

    outcomes = spread(sweep, parts)
    moments = sum((own for _, own in outcomes[1:]), outcomes[0][1])
    for own, (found, _) in zip(rooms, outcomes, strict=True):
        stored = min(found, own.stop - own.start)
        if own.start > count and count + stored <= index.size:
            index[count : count + stored] = index[own.start : own.start + stored]
            bits[count : count + stored] = bits[own.start : own.start + stored]
        if found > stored and len(parts) > 1:
            count = max(count, index.size)  # a part without room: not all of them are stored, whatever the sum
        count += found
    return count, moments


def is_finite(top: int, dtype: np.dtype) -> bool:
    """Tell from a sweep's largest magnitude bits whether every element was finite."""
    return int(top) < infinity_of(dtype)


def _moments(sums: tuple[float, ...], logarithms: bool, out: NDArray[np.floating]) -> Moments:
    _, nonzero, total, energy, logarithm = sums
    finite = bool(np.isfinite(energy))
    if not finite and out.dtype == np.float64:  # squares of finite numbers overflow too
        finite = is_finite(_top(as_bits(out), mask_of(out.dtype)), out.dtype)
    return Moments(int(nonzero), float(total), float(energy), float(logarithm) if logarithms else float("nan"), finite)


@kernel
def _add(first, second, out):  # type: ignore[no-untyped-def]
    nonzero = 0
    total, energy = out.dtype.type(0), out.dtype.type(0)
    for i in range(out.size):
        value = first[i] if second is None else first[i] + second[i]
        out[i] = value
        nonzero += value != 0
        total += abs(value)
        energy += value * value
    return nonzero, np.float64(total), np.float64(energy)


@kernel
def _sums(array):  # type: ignore[no-untyped-def]
    total, energy = 0.0, 0.0
    for i in range(array.size):
        value = np.float64(array[i])
        total += abs(value)
        energy += value * value
    return total, energy


@kernel
def _top(bits, mask):  # type: ignore[no-untyped-def]
    top = mask ^ mask
    for i in range(bits.size):
        top = max(top, bits[i] & mask)
    return top


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
def _logarithm(array):  # type: ignore[no-untyped-def]
    return _logarithm64(array) if array.itemsize == 8 else _logarithm32(array)


# The kernel goes through memory once, block by block, and lets each of the loops above run over a block while it lies
# in the first-level cache: apart they vectorise, together they do not, since an array and its bits are the same memory.
# Blocks are slices because an index that starts at zero needs no check of its sign.


@kernel
def _accumulate(gradient, residual, out, bits, mask, logarithms, bound, base, index, found):  # type: ignore[no-untyped-def]
    count, nonzero = 0, 0
    total, energy, logarithm = 0.0, 0.0, 0.0
    for start in range(0, out.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, out.size))
        part = out[block]
        own = _add(gradient[block], None, part) if residual is None else _add(gradient[block], residual[block], part)
        sums = (own[1], own[2])
        if own[0] > 0 and not (_LEAST < own[2] < _MOST):
            sums = _sums(part)
        nonzero += own[0]
        total += sums[0]
        energy += sums[1]
        if logarithms:
            logarithm += _logarithm(part)
        if bound is not None:
            magnitudes = bits[block]
            whole = magnitudes.size - magnitudes.size % LANES
            for first in range(0, whole, LANES):
                reached = at_least(magnitudes, first, bound)
                while reached != 0:
                    place = first + trailing_zeros(reached)
                    reached &= reached - np.uint64(1)
                    if count < index.size:
                        index[count] = base + start + place
                        found[count] = magnitudes[place] & mask
                    count += 1
            for place in range(whole, magnitudes.size):
                if (magnitudes[place] & mask) >= bound:
                    if count < index.size:
                        index[count] = base + start + place
                        found[count] = magnitudes[place] & mask
                    count += 1
    return count, nonzero, total, energy, logarithm
