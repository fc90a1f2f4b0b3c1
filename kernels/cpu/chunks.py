"""The largest magnitudes of each chunk of an array; equal ones go to the lowest index."""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, mask_of
from mpicomp.kernels.cpu.compile import Floats, Indices, kernel
from mpicomp.kernels.cpu.select import write_reaching

_FEW = 8  # elements of a chunk up to which a sorted list of the largest is faster than a radix selection
_DIGIT = 11  # most bits of a digit of the radix selection: its counters stay in the first-level cache with a chunk


def select_in_chunks(array: Floats, chunk: int, k: int, rest: int, indices: Indices, values: Floats) -> None:
    """Write the ``k`` largest elements of each chunk, ascending by index, while the chunk is in the cache.

    If the last chunk is shorter, ``rest`` of its elements are selected. NaN counts as larger than infinity.
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
        count = write_reaching(array, None, bits, mask, threshold, remaining, start, stop, count, indices, values)


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
