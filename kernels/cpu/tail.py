"""Kernels for the elements above a threshold: count them, sum their excess, and select them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpicomp.kernels.cpu.bit_ops import first_one
from mpicomp.kernels.cpu.bits import as_bits, magnitude_bits, mask_of
from mpicomp.kernels.cpu.compile import kernel
from mpicomp.kernels.cpu.moments import LEAST, MOST, strided
from mpicomp.kernels.cpu.simd import LANES, at_least
from mpicomp.kernels.cpu.threads import spread
from numpy.typing import NDArray

_BLOCK = 1024  # elements that are summed in the array's dtype


class Tail(NamedTuple):
    """The elements whose magnitudes exceed a threshold."""

    count: int  # type: ignore[assignment]  # hides the tuple method of that name
    """Number of these elements."""
    excess: float
    """Sum of ``|x| - threshold`` over them."""
    squares: float
    """Sum of ``(|x| - threshold)**2`` over them."""


def tail(array: NDArray[np.floating], threshold: float, stride: int = 1, threads: int = 1) -> Tail:
    """Count the elements above a threshold, and sum their excess, in one sweep that writes nothing.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64, contiguous.
    threshold : float
        Taken to the dtype of ``array`` first; magnitudes equal to it are not above it.
    stride : int
        1 looks at all elements, s at every s-th group of 1024 of them. Nothing is scaled up.
    threads : int
        Number of threads that share the sweep.

    Returns
    -------
    Tail
        Sums within 1024 elements are in the array's dtype, over them in float64.

    Examples
    --------
    >>> import numpy as np
    >>> tail(np.array([1, -3, 2, 5], np.float32), 2)
    Tail(count=2, excess=4.0, squares=10.0)
    """
    with np.errstate(over="ignore"):  # beyond the largest number stands infinity
        limit = np.float64(threshold).astype(array.dtype)
    parts = spread(lambda part: _tail(array[part], limit, stride), strided(array.size, stride, threads))
    return Tail(sum(int(part[0]) for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts))


def counts_above(array: NDArray[np.floating], thresholds: Sequence[float], threads: int = 1) -> list[int]:
    """Count the elements above each of a few thresholds; on a device in one sweep, and nothing waits.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64, contiguous.
    thresholds : sequence of float
        As in `tail`.
    threads : int
        Number of threads that share a sweep.

    Examples
    --------
    >>> import numpy as np
    >>> counts_above(np.array([1, -3, 2, 5], np.float32), [0, 2, 7])
    [4, 2, 0]
    """
    return [tail(array, threshold, 1, threads).count for threshold in thresholds]


def select_above(
    array: NDArray[np.floating],
    threshold: float,
    base: int,
    indices: NDArray[np.uint32],
    values: NDArray[np.floating],
    count: int,
) -> int:
    """Append the elements whose magnitudes exceed a threshold, ascending by index, in one sweep.

    Parameters
    ----------
    array, threshold
        As in `tail`; NaN is above every threshold.
    base : int
        Number that is added to a position to make an index.
    indices, values : arrays
        Filled from ``count`` on; ``values`` in the dtype of ``array``.
    count : int
        Elements that are there already.

    Returns
    -------
    int
        ``count`` and what was found; more than ``indices.size`` where not all of them were stored.

    Examples
    --------
    >>> import numpy as np
    >>> indices, values = np.zeros(3, np.uint32), np.zeros(3, np.float32)
    >>> select_above(np.array([1, -3, 2, 5], np.float32), 2, 10, indices, values, 0)
    2
    >>> indices.tolist(), values.tolist()
    ([11, 13, 0], [-3.0, 5.0, 0.0])
    """
    mask = mask_of(array.dtype)
    bound = mask.dtype.type(magnitude_bits(threshold, array.dtype) + 1)
    return int(_select_above(array, as_bits(array), mask, bound, base, indices, values, count))


def select_listed(
    index: NDArray[np.uint32],
    listed: NDArray[np.unsignedinteger],
    threshold: float,
    array: NDArray[np.floating],
    indices: NDArray[np.uint32],
    values: NDArray[np.floating],
) -> int:
    """Do what `select_above` does among listed candidates.

    Parameters
    ----------
    index, listed : arrays, shape (c,)
        Candidates and their magnitude bits as `accumulate_candidates` lists them.
    threshold : float
        At least the bound with which they were listed.
    array : array
        The array that the indices point into.
    indices, values : arrays
        Where the selection goes; there must be room for all candidates.

    Returns
    -------
    int
        Number of selected elements.
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
        if above > 0 and not (LEAST < sums[1] < MOST):
            sums = _excess(block, threshold)
        total += sums[0]
        squares += sums[1]
    return count, total, squares


@kernel
def _select_above(array, bits, mask, bound, base, indices, values, count):  # type: ignore[no-untyped-def]
    whole = bits.size - bits.size % LANES
    for first in range(0, whole, LANES):
        reached = at_least(bits, first, bound)
        while reached != 0:
            place = first + np.intp(first_one(reached))
            reached &= reached - np.uint64(1)
            if count < indices.size:
                indices[count] = base + place
                values[count] = array[place]
            count += 1
    for i in range(whole, bits.size):
        if (bits[i] & mask) >= bound:
            if count < indices.size:
                indices[count] = base + i
                values[count] = array[i]
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
