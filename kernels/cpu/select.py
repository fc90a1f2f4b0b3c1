"""Exact selection of the largest magnitudes; equal ones go to the lowest index."""

import numpy as np
from mpicomp.kernels.cpu.bits import MASKS, as_bits
from mpicomp.kernels.cpu.compile import Floats, Indices, kernel
from numpy.typing import NDArray

# Bits that a radix pass looks at. More of them make fewer passes, and more counters to clear: those that a large array
# fills lie close to each other and stay in the first-level cache.
_DIGIT = 11
_LARGE_DIGIT = 16  # from _LARGE elements on
_LARGE = 1 << 19  # elements


def kth_magnitude(array: Floats, k: int) -> int:
    """Return the magnitude bits of the k-th largest magnitude; NaN counts as larger than infinity.

    A radix selection takes 2 or 3 sweeps for float32, 4 or 6 for float64.
    """
    digit = _LARGE_DIGIT if array.size >= _LARGE else _DIGIT
    return int(_kth_magnitude(as_bits(array), MASKS[array.dtype], k, digit))


def select_largest(array: Floats, threshold: int, indices: Indices, values: Floats) -> None:
    """Write the ``indices.size`` largest elements, ascending by index, in two sweeps.

    ``threshold`` is the result of `kth_magnitude` for ``k = indices.size``.
    """
    mask = MASKS[array.dtype]
    _select_largest(array, None, as_bits(array), mask, mask.dtype.type(threshold), indices, values)


def select_candidates(
    index: Indices,
    bits: NDArray[np.unsignedinteger],
    scratch: NDArray[np.unsignedinteger],
    array: Floats,
    indices: Indices,
    values: Floats,
) -> int:
    """Write the ``indices.size`` largest of the candidates that `accumulate_candidates` listed, ascending by index.

    ``scratch`` has the size and dtype of ``bits``. Return the magnitude bits of the smallest selected element.
    """
    scratch[:] = bits
    kth = bits.size - indices.size
    scratch.partition(kth)
    threshold = scratch[kth]
    _select_largest(array, index, bits, MASKS[array.dtype], threshold, indices, values)
    return int(threshold)


@kernel
def _kth_magnitude(bits, mask, k, most):  # type: ignore[no-untyped-def]
    known = np.uint64(0)  # the digits found so far, at their place; 64 bits hold both widths
    shift = 8 * bits.itemsize - 1
    top = np.uint64(shift)
    remaining = k
    counts = np.empty(1 << most, np.int64)
    while shift > 0:
        above = np.uint64(shift)
        digit = min(most, shift)
        shift -= digit
        below = np.uint64(shift)
        last = np.uint64((1 << digit) - 1)
        prefix = known >> above
        counts[:] = 0
        if above == top:  # the first digit, of all elements
            for i in range(bits.size):
                counts[(bits[i] & mask) >> below] += 1
        else:
            for i in range(bits.size):
                magnitude = np.uint64(bits[i] & mask)
                if (magnitude >> above) == prefix:
                    counts[(magnitude >> below) & last] += 1
        place = (1 << digit) - 1
        while place > 0 and counts[place] < remaining:
            remaining -= counts[place]
            place -= 1
        known |= np.uint64(place) << below
    return known


@kernel
def _select_largest(array, index, bits, mask, threshold, indices, values):  # type: ignore[no-untyped-def]
    ties = indices.size
    for i in range(bits.size):
        if (bits[i] & mask) > threshold:
            ties -= 1
    count = 0
    for i in range(bits.size):
        magnitude = bits[i] & mask
        if magnitude >= threshold:
            if magnitude == threshold:
                if ties == 0:
                    continue
                ties -= 1
            place = i if index is None else index[i]
            indices[count] = place
            values[count] = array[place]
            count += 1
