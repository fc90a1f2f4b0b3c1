"""The largest magnitudes of each chunk of an array; equal ones go to the lowest index."""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, mask_of
from mpicomp.kernels.cpu.compile import kernel
from numpy.typing import NDArray

_FEW = 8  # elements of a chunk up to which a sorted list of the largest is faster than a radix selection
_DIGIT = 11  # most bits of a digit of the radix selection: its counters stay in the first-level cache with a chunk


def select_in_chunks(
    array: NDArray[np.floating],
    chunk: int,
    k: int,
    rest: int,
    indices: NDArray[np.uint32],
    values: NDArray[np.floating],
) -> None:
    """Write the largest elements of each chunk, ascending by index. A chunk is swept while it is in the cache.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64, contiguous.
    chunk : int
        Elements of a chunk; the last one may have fewer.
    k : int
        Elements to select of each whole chunk, from 1 to ``chunk``.
    rest : int
        Of a last one that is shorter, from 1 to its length; else without meaning.
    indices, values : arrays, shape (n // chunk * k + rest,)
        Where the selection goes. NaN counts as larger than infinity.

    Examples
    --------
    >>> import numpy as np
    >>> array = np.array([1, -3, 2, 0, 5, 4, 7], np.float32)
    >>> indices, values = np.empty(3, np.uint32), np.empty(3, np.float32)
    >>> select_in_chunks(array, 3, 1, 1, indices, values)
    >>> indices.tolist(), values.tolist()
    ([1, 4, 6], [-3.0, 5.0, 7.0])
    """
    bits, mask = as_bits(array), mask_of(array.dtype)
    _select_in_chunks(array, bits, mask, chunk, k, rest, np.empty(min(chunk, array.size), bits.dtype), indices, values)


@kernel
def _select_in_chunks(array, bits, mask, chunk, k, rest, listed, indices, values):  # type: ignore[no-untyped-def]
    # As many counters as elements: clearing and reading them takes no longer than sweeping a small chunk.
    most = 1
    while most < _DIGIT and 1 << most < chunk:
        most += 1
    counts = np.empty(1 << most, np.int32)
    count = 0
    for start in range(0, bits.size, chunk):
        stop = min(start + chunk, bits.size)
        remaining = k if stop - start == chunk else rest
        if remaining <= _FEW:
            threshold, remaining = _kth_of_few(bits, mask, start, stop, remaining, listed)
        else:
            threshold, remaining = _kth_in(bits, mask, start, stop, remaining, listed, most, counts)
        for i in range(start, stop):
            magnitude = bits[i] & mask
            if magnitude >= threshold:
                if magnitude == threshold:
                    if remaining == 0:
                        continue
                    remaining -= 1
                indices[count] = i
                values[count] = array[i]
                count += 1


@kernel
def _kth_of_few(bits, mask, start, stop, k, largest):  # type: ignore[no-untyped-def]
    """Return what `_kth_in` does: most elements are compared with the least of the k largest so far, and no more."""
    largest[:k] = 0
    for i in range(start, stop):
        magnitude = bits[i] & mask
        if magnitude > largest[0] or i < start + k:
            place = 0
            while place + 1 < k and largest[place + 1] < magnitude:
                largest[place] = largest[place + 1]
                place += 1
            largest[place] = magnitude
    equal = 0
    while equal < k and largest[equal] == largest[0]:
        equal += 1
    return largest[0], equal


@kernel
def _kth_in(bits, mask, start, stop, k, listed, most, counts):  # type: ignore[no-untyped-def]
    """Return the magnitude bits of the k-th largest of a part, and how many of those equal to it are among the k."""
    shift = 8 * bits.itemsize - 1 - most
    below = np.uint64(shift)
    counts[:] = 0
    for i in range(start, stop):
        counts[np.uint64(bits[i] & mask) >> below] += 1
    place = (1 << most) - 1
    while counts[place] < k:
        k -= counts[place]
        place -= 1
    # Of most chunks few elements share the first digit of the k-th.
    size = 0
    wanted = np.uint64(place)
    for i in range(start, stop):
        magnitude = bits[i] & mask
        if np.uint64(magnitude) >> below == wanted:
            listed[size] = magnitude
            size += 1
    while shift > 0:
        digit = min(most, shift)
        shift -= digit
        below, last = np.uint64(shift), np.uint64((1 << digit) - 1)
        counts[: 1 << digit] = 0
        for j in range(size):
            counts[(np.uint64(listed[j]) >> below) & last] += 1
        place = (1 << digit) - 1
        while counts[place] < k:
            k -= counts[place]
            place -= 1
        wanted = np.uint64(place)
        left = 0
        for j in range(size):
            if (np.uint64(listed[j]) >> below) & last == wanted:
                listed[left] = listed[j]
                left += 1
        size = left
    return listed[0], k
