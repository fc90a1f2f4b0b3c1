"""One bit an element: its sign, and for each block of elements the one magnitude that stands for all of them.

Bit j of word w is set where element ``64 * w + j`` is negative, by its sign bit. Blocks are multiples of 64 elements
long, but for the last one.
"""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits
from mpicomp.kernels.cpu.cast import _to_float32
from mpicomp.kernels.cpu.compile import Floats, Singles, Words, kernel
from mpicomp.kernels.cpu.simd import LANES, add_signed, negative, put_signed

_PART = 4096  # elements that stay in the first-level cache


def pack_signs(array: Floats, block: int, scales: Singles, words: Words, sent: Floats | None = None) -> float:
    """Reduce an array to its signs and the mean magnitude of each block, the one magnitude that loses least.

    A block has a multiple of 64 elements. Means beyond float32 become the largest number; NaN and infinity stay.
    ``words`` receives the signs, and zeros after the last element; ``sent`` receives the numbers that the receiver will
    see. Return the squared L2 norm of ``array - sent``; NaN or infinite where an element is.
    """
    return float(_pack_signs(array, as_bits(array), block, scales, words, sent, None))


def pack_signs_in_place(array: Floats, block: int, scales: Singles, words: Words) -> float:
    """Pack as `pack_signs`, and leave ``array - sent`` in the array, bit for bit."""
    return float(_pack_signs(array, as_bits(array), block, scales, words, None, array))


@kernel
def unpack_signs(scales: Singles, words: Words, block: int, out: Floats) -> None:
    """Decode the signs of `pack_signs` to a float32 or float64 array of the same length."""
    for number in range(scales.size):
        start = number * block
        _write(words, start, min(start + block, out.size), out.dtype.type(scales[number]), out, None)


def unpack_signs_add(
    scales: Singles, words: Words, block: int, factor: float, out: Floats, afresh: bool = False
) -> None:
    """Add ``factor`` times the array that each row of scales and words has from `pack_signs`, in the order of rows.

    It multiplies scales in float64, before they are rounded. ``out`` is swept over once, whatever the number of rows;
    with ``afresh`` they are added to zeros.
    """
    _unpack_signs_add(scales, words, block, factor, out, afresh)


def pack_votes(array: Floats, words: Words) -> None:
    """Reduce an array to its signs, with zeros after the last element."""
    _signs(as_bits(array), 0, array.size, words)


def unpack_votes(words: Words, value: float, out: Floats) -> None:
    """Write ``-value`` where a bit is set and ``value`` elsewhere, to a float32 or float64 array of shape (n,)."""
    _write(words, 0, out.size, out.dtype.type(value), out, None)


@kernel
def _scale(array, start, stop, total):  # type: ignore[no-untyped-def]
    mean = total / (stop - start)
    if np.isinf(mean):
        mean = 0.0  # the sum may have left float64, which the mean cannot
        for i in range(start, stop):
            mean += np.float64(abs(array[i])) / (stop - start)
    return _to_float32(mean)


@kernel
def _pack_signs(array, bits, block, scales, words, sent, left):  # type: ignore[no-untyped-def]
    # A part of a block is read twice: for its sums, and from the first-level cache for its signs. No slices are made of
    # it, which would take as long as a short block.
    lost = 0.0
    for number in range(scales.size):
        start = number * block
        stop = min(start + block, array.size)
        total = energy = 0.0
        for first in range(start, stop, _PART):
            last = min(first + _PART, stop)
            more, squares = _sums(array, np.uintp(first), np.uintp(last))
            total, energy = total + more, energy + squares
            _signs(bits, first, last, words)
        single = _scale(array, start, stop, total)
        scales[number] = single
        wide = np.float64(single)
        missed = energy - wide * (2 * total - (stop - start) * wide)
        if not missed < 0:  # both were rounded; NaN stays
            lost += missed
        if sent is not None:
            _write(words, start, stop, array.dtype.type(single), sent, None)
        if left is not None:
            _write(words, start, stop, -array.dtype.type(single), left, True)
    return lost


@kernel
def _sums(array, start, stop):  # type: ignore[no-untyped-def]
    total, energy = 0.0, 0.0
    for i in range(start, stop):  # without a sign, so that no index can count from the end
        value = np.float64(array[i])
        total += abs(value)
        energy += value * value
    return total, energy


@kernel
def _signs(bits, start, stop, words):  # type: ignore[no-untyped-def]
    whole = stop // LANES
    for w in range(start // LANES, whole):
        words[w] = negative(bits, w * LANES)
    if whole * LANES < stop:
        word = np.uint64(0)
        one, shift = bits.dtype.type(1), bits.dtype.type(8 * bits.itemsize - 1)
        for i in range(whole * LANES, stop):
            word |= np.uint64((bits[i] >> shift) & one) << np.uint64(i % LANES)
        words[whole] = word


@kernel
def _write(words, start, stop, value, out, add):  # type: ignore[no-untyped-def]
    whole = stop // LANES
    for w in range(start // LANES, whole):
        if add is None:
            put_signed(out, w * LANES, words[w], value)
        else:
            add_signed(out, w * LANES, words[w], value)
    for i in range(whole * LANES, stop):
        signed = -value if words[whole] >> np.uint64(i % LANES) & np.uint64(1) else value
        out[i] = signed if add is None else out[i] + signed


@kernel
def _unpack_signs_add(scales, words, block, factor, out, afresh):  # type: ignore[no-untyped-def]
    for number in range(scales.shape[1]):
        end = min(out.size, (number + 1) * block)
        for start in range(number * block, end, _PART):
            if afresh:
                out[start : min(start + _PART, end)] = 0
            for row in range(scales.shape[0]):
                value = out.dtype.type(factor * scales[row, number])
                _write(words[row], start, min(start + _PART, end), value, out, True)
