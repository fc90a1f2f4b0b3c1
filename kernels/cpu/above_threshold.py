"""Kernels for the elements above a threshold: count them, sum their excess, and select them."""

from typing import NamedTuple

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, magnitude_bits, mask_of
from mpicomp.kernels.cpu.compile import Floats, Indices, kernel, spread
from mpicomp.kernels.cpu.moments import MAX_ENERGY, MIN_ENERGY, strided
from mpicomp.kernels.cpu.simd import LANES, at_least, first_one
from numpy.typing import NDArray

_BLOCK = 1024  # elements that are summed in the array's dtype


class TailStatistics(NamedTuple):
    """The elements whose magnitudes exceed a threshold."""

    count: int  # type: ignore[assignment]  # hides the tuple method of that name
    """Number of these elements."""
    excess: float  # sum of ``|x| - threshold`` over them
    squares: float  # sum of ``(|x| - threshold)**2`` over them


def tail_statistics(array: Floats, threshold: float, stride: int = 1, threads: int = 1) -> TailStatistics:
    """Count the elements above a threshold and sum their excess, in one sweep that writes nothing.

    The threshold is rounded to the dtype of ``array``; magnitudes equal to it are not above it. With a stride s every
    s-th group of 1024 elements is swept; nothing is scaled up. Sums of 1024 elements are in the dtype of the array.
    """
    with np.errstate(over="ignore"):  # beyond the largest number stands infinity
        limit = np.float64(threshold).astype(array.dtype)
    parts = spread(lambda part: _tail(array[part], limit, stride), strided(array.size, stride, threads))
    return TailStatistics(
        sum(int(part[0]) for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts)
    )


def select_above(array: Floats, threshold: float, base: int, indices: Indices, values: Floats, count: int) -> int:
    """Append the elements above a threshold, ascending by index, to the outputs from ``count`` on, in one sweep.

    NaN is above every threshold. Indices are positions plus ``base``. Return ``count`` plus the number of elements,
    which is above ``indices.size`` where not all of them were stored.
    """
    mask = mask_of(array.dtype)
    bound = mask.dtype.type(magnitude_bits(threshold, array.dtype) + 1)
    return int(append_reaching(array, as_bits(array), mask, bound, base, indices, values, count))


def select_listed(
    index: Indices,
    listed: NDArray[np.unsignedinteger],
    threshold: float,
    array: Floats,
    indices: Indices,
    values: Floats,
) -> int:
    """Select as `select_above` among the candidates that `accumulate_candidates` listed; return their number.

    The threshold is at least the bound of the list. There is room for all candidates.
    """
    bound = listed.dtype.type(magnitude_bits(threshold, array.dtype) + 1)
    return int(_select_listed(index, listed, bound, array, indices, values))


@kernel
def _excess(array, threshold):  # type: ignore[no-untyped-def]
    excess, square = 0.0, 0.0
    for i in range(array.size):
        if not (abs(array[i]) <= threshold):
            over = np.float64(abs(array[i])) - np.float64(threshold)
            excess += over
            square += over * over
    return excess, square


@kernel
def _tail(array, threshold, stride):  # type: ignore[no-untyped-def]
    count, total, squares = 0, 0.0, 0.0
    for start in range(0, array.size, _BLOCK * stride):
        block = array[start : start + _BLOCK]
        above = 0
        excess, square = array.dtype.type(0), array.dtype.type(0)
        for i in range(block.size):
            # No branch: the loop would not be vectorised. NaN, which is above everything, spoils the sums.
            beyond = not (abs(block[i]) <= threshold)
            over = abs(block[i]) - threshold if beyond else array.dtype.type(0)
            above += beyond
            excess += over
            square += over * over
        count += above
        sums = (np.float64(excess), np.float64(square))
        if above > 0 and not (MIN_ENERGY < sums[1] < MAX_ENERGY):
            sums = _excess(block, threshold)
        total += sums[0]
        squares += sums[1]
    return count, total, squares


@kernel
def append_reaching(array, bits, mask, bound, base, indices, values, count):  # type: ignore[no-untyped-def]
    """Append indices and elements, or magnitude bits without an array, from a bound up; return their end."""
    whole = bits.size - bits.size % LANES
    for first in range(0, whole, LANES):
        reached = at_least(bits, first, bound)
        while reached != 0:
            place = first + np.intp(first_one(reached))
            reached &= reached - np.uint64(1)
            if count < indices.size:
                indices[count] = base + place
                values[count] = bits[place] & mask if array is None else array[place]
            count += 1
    for i in range(whole, bits.size):
        if (bits[i] & mask) >= bound:
            if count < indices.size:
                indices[count] = base + i
                values[count] = bits[i] & mask if array is None else array[i]
            count += 1
    return count


@kernel
def _select_listed(index, listed, bound, array, indices, values):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(listed.size):
        if listed[j] >= bound:
            indices[count] = index[j]
            values[count] = array[index[j]]
            count += 1
    return count
