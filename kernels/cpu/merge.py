"""Sorted selections: their sum, difference and common part, and the largest of them.

A selection is a list of indices that ascend without repetition, with a value each. Nothing checks that they ascend;
where they do not, the result means nothing, but nothing outside the arrays is touched.
"""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, mask_of
from mpicomp.kernels.cpu.compile import Floats, Indices, kernel


def merge_add(
    indices_a: Indices, values_a: Floats, indices_b: Indices, values_b: Floats, out_indices: Indices, out_values: Floats
) -> int:
    """Write the union of two selections and return its length; where both have an index, values are added.

    The outputs have room for both selections and must not overlap them; they are undefined after the union.
    """
    _check_room("merge_add", indices_a.size + indices_b.size, out_indices, out_values)
    return int(_merge(indices_a, values_a, indices_b, values_b, out_indices, out_values, None))


def merge_subtract(
    indices_a: Indices, values_a: Floats, indices_b: Indices, values_b: Floats, out_indices: Indices, out_values: Floats
) -> int:
    """Subtract the second selection from the first: `merge_add` with negative ``values_b``, but without zeros.

    An element whose index only the first selection has stays, whatever its value.
    """
    _check_room("merge_subtract", indices_a.size + indices_b.size, out_indices, out_values)
    return int(_merge(indices_a, values_a, indices_b, values_b, out_indices, out_values, True))


def intersect(
    indices_a: Indices, values_a: Floats, indices_b: Indices, out_indices: Indices, out_values: Floats
) -> int:
    """Write the elements of a selection whose indices are in another list; return their number.

    The outputs have room for as many elements as the shorter list has.
    """
    _check_room("intersect", min(indices_a.size, indices_b.size), out_indices, out_values)
    return int(_intersect(indices_a, values_a, indices_b, out_indices, out_values))


def count_reaching(values: Floats, threshold: int) -> int:
    """Count the values whose magnitude bits are at least ``threshold``; see `magnitude_bits`."""
    mask = mask_of(values.dtype)
    return int(_count_reaching(as_bits(values), mask, mask.dtype.type(threshold)))


def split_largest(
    indices: Indices,
    values: Floats,
    threshold: int,
    kept_indices: Indices,
    kept_values: Floats,
    left_indices: Indices,
    left_values: Floats,
) -> None:
    """Split a selection into its largest elements and the others; both stay in order.

    ``threshold`` is the magnitude bits of the smallest element that is kept. Of those equal to it the ones of lowest
    index are kept, as many as fit.
    """
    above, reaching = count_reaching(values, threshold + 1), count_reaching(values, threshold)
    kept = kept_indices.size
    if not above <= kept <= reaching or left_indices.size != values.size - kept:
        raise ValueError(f"split_largest: {values.size} elements, {above} to {reaching} of them large, not {kept}")
    mask = mask_of(values.dtype)
    _split_largest(
        indices, values, as_bits(values), mask, mask.dtype.type(threshold), kept - above,
        kept_indices, kept_values, left_indices, left_values,
    )  # fmt: skip


@kernel
def norm_change(array: Floats, indices: Indices, sent: Floats) -> float:
    """Return how much the squared L2 norm of ``array`` changes when ``sent`` is subtracted at ``indices``.

    Indices are in range and do not repeat. The array is not changed.
    """
    change = 0.0
    for j in range(indices.size):
        before = np.float64(array[indices[j]])
        after = before - np.float64(sent[j])
        change += after * after - before * before
    return change


def _check_room(name: str, needed: int, indices: Indices, values: Floats) -> None:
    if min(indices.size, values.size) < needed:
        raise ValueError(f"{name}: room for {needed} elements is needed, got {min(indices.size, values.size)}")


# The next element is taken by arithmetic, not by a branch: which list has it cannot be predicted.


@kernel
def _merge(indices_a, values_a, indices_b, values_b, out_indices, out_values, subtract):  # type: ignore[no-untyped-def]
    a, b, count = 0, 0, 0
    nothing = out_values.dtype.type(0)
    while a < indices_a.size and b < indices_b.size:
        first, second = indices_a[a], indices_b[b]
        out_indices[count] = min(first, second)
        left, right = values_a[a], values_b[b]
        left, right = left if first <= second else nothing, right if second <= first else nothing
        value = left + right if subtract is None else left - right
        out_values[count] = value
        a += first <= second
        b += second <= first
        count += True if subtract is None else (first < second) | (value != 0)
    while a < indices_a.size:
        out_indices[count] = indices_a[a]
        out_values[count] = values_a[a]
        a += 1
        count += 1
    while b < indices_b.size:
        out_indices[count] = indices_b[b]
        out_values[count] = values_b[b] if subtract is None else -values_b[b]
        count += True if subtract is None else values_b[b] != 0
        b += 1
    return count


@kernel
def _intersect(indices_a, values_a, indices_b, out_indices, out_values):  # type: ignore[no-untyped-def]
    # While both lists last, fewer elements than the shorter one has were found: the output is long enough.
    a, b, count = 0, 0, 0
    while a < indices_a.size and b < indices_b.size:
        first, second = indices_a[a], indices_b[b]
        out_indices[count] = first
        out_values[count] = values_a[a]
        count += first == second
        a += first <= second
        b += second <= first
    return count


@kernel
def _count_reaching(bits, mask, threshold):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(bits.size):
        count += (bits[j] & mask) >= threshold
    return count


@kernel
def _split_largest(  # type: ignore[no-untyped-def]
    indices, values, bits, mask, threshold, ties, kept_indices, kept_values, left_indices, left_values
):
    # Both places are written and one of them moves on; once either part is full, all that follows is the other's.
    kept, left, j = 0, 0, 0
    while kept < kept_indices.size and left < left_indices.size:
        magnitude = bits[j] & mask
        tied = magnitude == threshold
        large = (magnitude > threshold) | (tied & (ties > 0))
        ties -= tied
        kept_indices[kept] = indices[j]
        kept_values[kept] = values[j]
        left_indices[left] = indices[j]
        left_values[left] = values[j]
        kept += large
        left += not large
        j += 1
    # Not as slices: for the message of their error Numba compiles strings, which takes longer than all other kernels.
    while kept < kept_indices.size:
        kept_indices[kept] = indices[j]
        kept_values[kept] = values[j]
        kept += 1
        j += 1
    while left < left_indices.size:
        left_indices[left] = indices[j]
        left_values[left] = values[j]
        left += 1
        j += 1
