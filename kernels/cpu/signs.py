"""One bit an element: its sign, and for each block of elements the one magnitude that stands for all of them.

Bit j of word w is set where element ``64 * w + j`` is negative, by its sign bit. Blocks are multiples of 64 elements
long, but for the last one.
"""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits
from mpicomp.kernels.cpu.cast import _to_float32
from mpicomp.kernels.cpu.compile import Floats, Singles, Words, kernel
from mpicomp.kernels.cpu.moments import _sums
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
    """Do what `pack_signs` does, and leave ``array - sent`` in the array, bit for bit."""
    return float(_pack_signs(array, as_bits(array), block, scales, words, None, array))


def unpack_signs(scales: Singles, words: Words, block: int, out: Floats) -> None:
    """Write what `pack_signs` has packed to a float32 or float64 array of the same length."""
    _unpack_signs(scales, words, block, out)


def unpack_signs_add(scales: Singles, words: Words, block: int, factor: float, out: Floats) -> None:
    """Add ``factor`` times what `pack_signs` has packed into each row of scales and words, in the order of rows.

    It multiplies scales in float64, before they are rounded. ``out`` is swept over once, whatever the number of rows.
    """
    _unpack_signs_add(scales, words, block, factor, out)


@kernel
def _scale(array, total):  # type: ignore[no-untyped-def]
    mean = total / array.size
    if np.isinf(mean):
        mean = 0.0  # the sum may have left float64, which the mean cannot
        for i in range(array.size):
            mean += np.float64(abs(array[i])) / array.size
    return _to_float32(mean)


@kernel
def _pack_signs(array, bits, block, scales, words, sent, left):  # type: ignore[no-untyped-def]
    # A part of a block is read twice: for its sums, and from the first-level cache for its signs.
    lost = 0.0
    for number in range(scales.size):
        start = number * block
        part = array[start : start + block]
        words_of_block = words[start // LANES : (start + block) // LANES]
        total = energy = 0.0
        for first in range(0, part.size, _PART):
            more, squares = _sums(part[first : first + _PART])
            total, energy = total + more, energy + squares
            _signs(bits[start + first : start + min(first + _PART, part.size)], words_of_block[first // LANES :])
        single = _scale(part, total)
        scales[number] = single
        wide = np.float64(single)
        missed = energy - wide * (2 * total - part.size * wide)
        if not missed < 0:  # both were rounded; NaN stays
            lost += missed
        if sent is not None:
            _write(words_of_block, array.dtype.type(single), sent[start : start + block], None)
        if left is not None:
            _write(words_of_block, -array.dtype.type(single), left[start : start + block], True)
    return lost


@kernel
def _signs(bits, words):  # type: ignore[no-untyped-def]
    whole = bits.size // LANES
    for w in range(whole):
        words[w] = negative(bits, w * LANES)
    if whole * LANES < bits.size:
        word = np.uint64(0)
        one, shift = bits.dtype.type(1), bits.dtype.type(8 * bits.itemsize - 1)
        for i in range(whole * LANES, bits.size):
            word |= np.uint64((bits[i] >> shift) & one) << np.uint64(i % LANES)
        words[whole] = word


@kernel
def _write(words, value, out, add):  # type: ignore[no-untyped-def]
    whole = out.size // LANES
    for w in range(whole):
        if add is None:
            put_signed(out, w * LANES, words[w], value)
        else:
            add_signed(out, w * LANES, words[w], value)
    for i in range(whole * LANES, out.size):
        signed = -value if words[whole] >> np.uint64(i % LANES) & np.uint64(1) else value
        out[i] = signed if add is None else out[i] + signed


@kernel
def _unpack_signs(scales, words, block, out):  # type: ignore[no-untyped-def]
    for number in range(scales.size):
        start = number * block
        value = out.dtype.type(scales[number])
        _write(words[start // LANES : (start + block) // LANES], value, out[start : start + block], None)


@kernel
def _unpack_signs_add(scales, words, block, factor, out):  # type: ignore[no-untyped-def]
    for number in range(scales.shape[1]):
        for start in range(number * block, min(out.size, (number + 1) * block), _PART):
            stop = min(start + _PART, (number + 1) * block)
            for row in range(scales.shape[0]):
                value = out.dtype.type(factor * scales[row, number])
                _write(words[row, start // LANES : stop // LANES], value, out[start:stop], True)
