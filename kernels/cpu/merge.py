"""Sorted selections: their sum, difference and common part, and the largest of them.

A selection is a list of indices that ascend without repetition, with a value each. Nothing checks that they ascend;
where they do not, the result means nothing, but nothing outside the arrays is touched.
"""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, mask_of
from mpicomp.kernels.cpu.compile import kernel
from numpy.typing import NDArray


def merge_add(
    indices_a: NDArray[np.uint32],
    values_a: NDArray[np.floating],
    indices_b: NDArray[np.uint32],
    values_b: NDArray[np.floating],
    out_indices: NDArray[np.uint32],
    out_values: NDArray[np.floating],
) -> int:
    """Write the union of two selections; where both have an index, the sum of their values.

    Parameters
    ----------
    indices_a, values_a : arrays, shape (a,)
        One selection; values are float32 or float64.
    indices_b, values_b : arrays, shape (b,)
        The other; values of the same dtype.
    out_indices, out_values : arrays
        Receive the union; at least ``a + b`` elements, which must not overlap the selections'.

    Returns
    -------
    int
        How many elements the union has. What the arrays hold behind them has no meaning.

    Raises
    ------
    ValueError
        Where there is no room for all.

    Examples
    --------
    >>> import numpy as np
    >>> indices, values = np.zeros(4, np.uint32), np.zeros(4, np.float32)
    >>> three, five = np.array([1, 3], np.uint32), np.array([3, 4], np.uint32)
    >>> merge_add(three, np.array([1, 2], np.float32), five, np.array([5, 6], np.float32), indices, values)
    3
    >>> indices[:3].tolist(), values[:3].tolist()
    ([1, 3, 4], [1.0, 7.0, 6.0])
    """
    _check_room("merge_add", indices_a.size + indices_b.size, out_indices, out_values)
    return int(_merge_add(indices_a, values_a, indices_b, values_b, out_indices, out_values))


def merge_subtract(
    indices_a: NDArray[np.uint32],
    values_a: NDArray[np.floating],
    indices_b: NDArray[np.uint32],
    values_b: NDArray[np.floating],
    out_indices: NDArray[np.uint32],
    out_values: NDArray[np.floating],
) -> int:
    """Subtract one selection from another: like `merge_add` with negative ``values_b``, but zeros are left out.

    An element of the first selection whose index the second one does not have stays, whatever its value.

    Examples
    --------
    >>> import numpy as np
    >>> indices, values = np.zeros(4, np.uint32), np.zeros(4, np.float32)
    >>> three, five = np.array([1, 3], np.uint32), np.array([3, 4], np.uint32)
    >>> merge_subtract(three, np.array([1, 5], np.float32), five, np.array([5, 6], np.float32), indices, values)
    2
    >>> indices[:2].tolist(), values[:2].tolist()
    ([1, 4], [1.0, -6.0])
    """
    _check_room("merge_subtract", indices_a.size + indices_b.size, out_indices, out_values)
    return int(_merge_subtract(indices_a, values_a, indices_b, values_b, out_indices, out_values))


def intersect(
    indices_a: NDArray[np.uint32],
    values_a: NDArray[np.floating],
    indices_b: NDArray[np.uint32],
    out_indices: NDArray[np.uint32],
    out_values: NDArray[np.floating],
) -> int:
    """Write the part of a selection whose indices are also in another list; return its length.

    Parameters
    ----------
    indices_a, values_a : arrays, shape (a,)
        The selection.
    indices_b : array of uint32, shape (b,)
        The list.
    out_indices, out_values : arrays
        Receive the part; at least as many elements as the shorter list.

    Raises
    ------
    ValueError
        Where there is no room for all.

    Examples
    --------
    >>> import numpy as np
    >>> indices, values = np.zeros(2, np.uint32), np.zeros(2, np.float32)
    >>> three, five = np.array([1, 3], np.uint32), np.array([3, 4], np.uint32)
    >>> intersect(three, np.array([1, 2], np.float32), five, indices, values), int(indices[0]), float(values[0])
    (1, 3, 2.0)
    """
    _check_room("intersect", min(indices_a.size, indices_b.size), out_indices, out_values)
    return int(_intersect(indices_a, values_a, indices_b, out_indices, out_values))


def count_reaching(values: NDArray[np.floating], threshold: int) -> int:
    """Count the values whose magnitude bits are at least ``threshold``; see `magnitude_bits`."""
    mask = mask_of(values.dtype)
    return int(_count_reaching(as_bits(values), mask, mask.dtype.type(threshold)))


def split_largest(
    indices: NDArray[np.uint32],
    values: NDArray[np.floating],
    threshold: int,
    kept_indices: NDArray[np.uint32],
    kept_values: NDArray[np.floating],
    left_indices: NDArray[np.uint32],
    left_values: NDArray[np.floating],
) -> None:
    """Part a selection into its largest elements and the others; both stay in order.

    Parameters
    ----------
    indices, values : arrays, shape (n,)
        The selection.
    threshold : int
        Magnitude bits of the smallest element that is kept. Of those equal to it the ones of lowest index are.
    kept_indices, kept_values : arrays, shape (k,)
        Receive the ``k`` largest.
    left_indices, left_values : arrays, shape (n - k,)
        Receive the others.

    Raises
    ------
    ValueError
        Where ``k`` elements with this threshold are not what the selection has.

    Examples
    --------
    >>> import numpy as np
    >>> indices, values = np.array([2, 5, 7], np.uint32), np.array([1, -3, 1], np.float32)
    >>> kept = np.zeros(2, np.uint32), np.zeros(2, np.float32)
    >>> left = np.zeros(1, np.uint32), np.zeros(1, np.float32)
    >>> from mpicomp.kernels.cpu import kth_magnitude
    >>> split_largest(indices, values, kth_magnitude(values, 2), *kept, *left)
    >>> kept[0].tolist(), left[0].tolist()
    ([2, 5], [7])
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


def norm_change(array: NDArray[np.floating], indices: NDArray[np.uint32], sent: NDArray[np.floating]) -> float:
    """Return by how much the squared L2 norm of ``array`` changes when ``sent`` is taken away from it at ``indices``.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64; it is not changed.
    indices : array of uint32, shape (k,)
        In range, without repetition.
    sent : array, shape (k,)
        Of the dtype of ``array``.

    Examples
    --------
    >>> import numpy as np
    >>> norm_change(np.array([1, 3, 4], np.float32), np.array([0, 2], np.uint32), np.array([-1, 4], np.float32))
    -13.0
    """
    return float(_norm_change(array, indices, sent))


def _check_room(name: str, needed: int, indices: NDArray[np.uint32], values: NDArray[np.floating]) -> None:
    if min(indices.size, values.size) < needed:
        raise ValueError(f"{name}: room for {needed} elements is needed, got {min(indices.size, values.size)}")


# The next element is taken by arithmetic, not by a branch: which list has it cannot be predicted.


@kernel
def _merge_add(indices_a, values_a, indices_b, values_b, out_indices, out_values):  # type: ignore[no-untyped-def]
    a, b, count = 0, 0, 0
    nothing = out_values.dtype.type(0)
    while a < indices_a.size and b < indices_b.size:
        first, second = indices_a[a], indices_b[b]
        out_indices[count] = min(first, second)
        left, right = values_a[a], values_b[b]
        out_values[count] = (left if first <= second else nothing) + (right if second <= first else nothing)
        a += first <= second
        b += second <= first
        count += 1
    while a < indices_a.size:
        out_indices[count] = indices_a[a]
        out_values[count] = values_a[a]
        a += 1
        count += 1
    while b < indices_b.size:
        out_indices[count] = indices_b[b]
        out_values[count] = values_b[b]
        b += 1
        count += 1
    return count


@kernel
def _merge_subtract(indices_a, values_a, indices_b, values_b, out_indices, out_values):  # type: ignore[no-untyped-def]
    a, b, count = 0, 0, 0
    nothing = out_values.dtype.type(0)
    while a < indices_a.size and b < indices_b.size:
        first, second = indices_a[a], indices_b[b]
        out_indices[count] = min(first, second)
        left, right = values_a[a], values_b[b]
        difference = (left if first <= second else nothing) - (right if second <= first else nothing)
        out_values[count] = difference
        a += first <= second
        b += second <= first
        count += (first < second) | (difference != 0)
    while a < indices_a.size:
        out_indices[count] = indices_a[a]
        out_values[count] = values_a[a]
        a += 1
        count += 1
    while b < indices_b.size:
        out_indices[count] = indices_b[b]
        out_values[count] = -values_b[b]
        count += values_b[b] != 0
        b += 1
    return count


@kernel
def _intersect(indices_a, values_a, indices_b, out_indices, out_values):  # type: ignore[no-untyped-def]
    # While both lists last, fewer elements than the shorter one has were found: there is room for what is written.
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
    if left == left_indices.size:
        kept_indices[kept:], kept_values[kept:] = indices[j:], values[j:]
    else:
        left_indices[left:], left_values[left:] = indices[j:], values[j:]


@kernel
def _norm_change(array, indices, sent):  # type: ignore[no-untyped-def]
    change = 0.0
    for j in range(indices.size):
        before = np.float64(array[indices[j]])
        after = before - np.float64(sent[j])
        change += after * after - before * before
    return change
