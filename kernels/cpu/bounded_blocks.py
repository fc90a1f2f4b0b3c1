"""Arrays as integers on a grid that ranks share, in blocks of 64 elements that are each packed by their own width.

A message has a byte for each block, filled up to a whole word, and then the words of the blocks. The lower six bits of
the byte are the width w, and the block has w words: the bit planes, see `mpicomp.kernels.cpu.bit_planes`, of its
integers, of the differences of neighbors or of the differences of those, by the number in the upper two bits: 0, 1 or
2. Differences begin with the last two integers before the block. Signs are folded in: 0, -1, 1, -2 become 0, 1, 2, 3. A
block whose byte is `RAW` has its elements uncoded: where one is beyond the limit of the grid or no number, and
where integers would be no shorter.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from mpicomp.kernels.cpu.bit_planes import _read, _write
from mpicomp.kernels.cpu.compile import Floats, Words, exact, kernel
from numpy.typing import NDArray

BLOCK = 64  # elements of a block: one word has a bit of each

RAW = 192
_ORDER, _WIDTH = 6, 63  # where a byte has the order of differences, and the bits that are the width
_WIDEST = {4: 31, 8: 62}  # bits of an integer by the bytes of an element
_SCALE = 2.0**-32  # with it the sums of up to 2**32 numbers stay finite, and the loss is below 1e-300


def bounded_words(count: int, itemsize: int) -> int:
    """Return the most words that a message of ``count`` elements has.

    >>> bounded_words(0, 4), bounded_words(1, 4), bounded_words(640, 8)
    (0, 33, 642)
    """
    blocks = -(-count // BLOCK)
    return -(-blocks // 8) + blocks * BLOCK * itemsize // 8


def check_bounded(message: Words, count: int, itemsize: int) -> bool:
    """Return whether a message has the length that the bytes of its blocks announce, and no unknown byte.

    The other kernels check nothing: they read and write within the length of a message for which this is true.
    """
    blocks = -(-count // BLOCK)
    first = -(-blocks // 8)
    if message.size < first:
        return False
    lengths = np.full(256, -1)
    widths = np.arange(_WIDEST[itemsize] + 1)
    for order in range(3):
        lengths[widths + (order << _ORDER)] = widths
    lengths[RAW] = BLOCK * itemsize // 8
    announced = lengths[message.view(np.uint8)[:blocks]]
    return bool((announced >= 0).all() and announced.sum() == message.size - first)


def pack_bounded(array: Floats, step: float, limit: float, words: Words) -> int:
    """Round an array to multiples of ``step`` and write its message; return the length in words.

    A block with an element beyond ``-limit`` to ``limit`` is sent uncoded. ``limit / step`` has to leave four bits of
    the integers of an element's width free.
    """
    return int(_pack(array, 1 / step, limit, _views(words, array.dtype), *_scratch(array.dtype)))


def add_bounded(messages: Words, starts: NDArray[np.int64], count: int, step: float, divisor: int, out: Floats) -> int:
    """Add the ranks' messages of ``count`` elements, write the message of the result, and return its length in words.

    Rank r's message is ``messages[starts[r] : starts[r + 1]]``; ``out`` is a view as floats of the words to write.
    Integers are added as integers. A block that some rank has sent uncoded becomes the exact sum over ranks, divided
    by ``divisor``, uncoded too.
    """
    scratch = _scratch(out.dtype)
    views, out_views = _views(messages, out.dtype), _views(out.view(np.uint64), out.dtype)
    return int(_add(views, starts, count, step, divisor, out_views, *scratch, np.zeros_like(scratch[0])))


def unpack_bounded(message: Words, factor: float, out: Floats) -> None:
    """Write a message's integers times ``factor``, and its uncoded elements unscaled."""
    _unpack(_views(message, out.dtype), factor, *_scratch(out.dtype), out)


class _Message(NamedTuple):
    words: Words
    heads: NDArray[np.uint8]
    values: Floats


def _views(words: Words, dtype: np.dtype[Any]) -> _Message:
    return _Message(words, words.view(np.uint8), words.view(dtype))


def _scratch(dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.zeros(BLOCK + 2, f"i{dtype.itemsize}"), np.empty((3, BLOCK), f"u{dtype.itemsize}")


# Both are put in place of their calls: a call with arrays takes as long as the block does.


@numba.njit(inline="always")
def _encode(ints, folded, planes, words, place):  # type: ignore[no-untyped-def]
    """Write a block's integers from word ``place`` on and return its byte: `RAW`, and nothing, if they are too wide."""
    signed, unsigned = ints.dtype.type, folded.dtype.type
    one, sign = signed(1), signed(8 * ints.itemsize - 1)
    plain, once, twice = unsigned(0), unsigned(0), unsigned(0)
    for i in range(BLOCK):
        number = ints[i + 2]
        bits = unsigned(signed(number << one) ^ signed(number >> sign))
        folded[0, i] = bits
        plain = unsigned(plain | bits)
    for i in range(BLOCK):
        number = signed(ints[i + 2] - ints[i + 1])
        bits = unsigned(signed(number << one) ^ signed(number >> sign))
        folded[1, i] = bits
        once = unsigned(once | bits)
    for i in range(BLOCK):
        number = signed(signed(ints[i + 2] - ints[i + 1]) - signed(ints[i + 1] - ints[i]))
        bits = unsigned(signed(number << one) ^ signed(number >> sign))
        folded[2, i] = bits
        twice = unsigned(twice | bits)
    order = 0 if plain <= once and plain <= twice else 1 if once <= twice else 2
    bits = np.uint64(min(plain, once, twice))
    width = 0
    while width < 64 and bits >> np.uint64(width):
        width += 1
    byte = RAW
    if width < min(8 * ints.itemsize, 63):
        byte = (order << _ORDER) + width
        for layer in range(0, width, 8):
            shift = unsigned(layer)
            for i in range(BLOCK):
                planes[i] = np.uint8(unsigned(folded[order, i] >> shift) & unsigned(255))
            _write(planes, 0, min(8, width - layer), words, place + layer)
    return byte


@numba.njit(inline="always")
def _decode(byte, words, place, folded, planes, ints):  # type: ignore[no-untyped-def]
    signed, unsigned = ints.dtype.type, folded.dtype.type
    width, one = byte & _WIDTH, unsigned(1)
    _read(words, place, min(8, width), planes, 0)
    for i in range(BLOCK):
        folded[0, i] = unsigned(planes[i])
    for layer in range(8, width, 8):
        _read(words, place + layer, min(8, width - layer), planes, 0)
        shift = unsigned(layer)
        for i in range(BLOCK):
            folded[0, i] = unsigned(folded[0, i] | unsigned(unsigned(planes[i]) << shift))
    for i in range(BLOCK):
        ints[i + 2] = signed(signed(folded[0, i] >> one) ^ signed(-signed(folded[0, i] & one)))
    order, last = byte >> _ORDER, ints[1]
    if order == 1:
        for i in range(BLOCK):
            last = signed(last + ints[i + 2])
            ints[i + 2] = last
    elif order == 2:
        change = signed(last - ints[0])
        for i in range(BLOCK):
            change = signed(change + ints[i + 2])
            last = signed(last + change)
            ints[i + 2] = last


@kernel
def _pack(array, inverse, limit, message, ints, folded):  # type: ignore[no-untyped-def]
    signed, (words, heads, values) = ints.dtype.type, message
    blocks = (array.size + BLOCK - 1) // BLOCK
    place, wide = (blocks + 7) // 8, BLOCK * array.itemsize // 8
    planes = np.empty(BLOCK, np.uint8)
    for i in range(blocks, 8 * place):
        heads[i] = 0
    for block in range(blocks):
        part = array[block * BLOCK : (block + 1) * BLOCK]
        beyond = np.uint32(0)
        for i in range(part.size):
            ints[i + 2] = signed(np.rint(np.float64(part[i]) * inverse))
            beyond = np.uint32(beyond | np.uint32(not abs(np.float64(part[i])) <= limit))
        for i in range(part.size, BLOCK):
            ints[i + 2] = ints[part.size + 1]
        byte = RAW
        if not beyond:
            byte = _encode(ints, folded, planes, words, place)
        heads[block] = byte
        if byte == RAW:
            first = place * 8 // array.itemsize
            for i in range(BLOCK):
                values[first + i] = part[i] if i < part.size else 0
            place += wide
        else:
            ints[0], ints[1] = ints[BLOCK], ints[BLOCK + 1]
            place += byte & _WIDTH
    return place


@exact
def _add(messages, starts, count, step, divisor, out, ints, folded, total):  # type: ignore[no-untyped-def]
    words, heads, values = messages
    out_words, out_heads, out_values = out
    ranks, blocks, itemsize = starts.size - 1, (count + BLOCK - 1) // BLOCK, out_values.itemsize
    place, wide, factor = (blocks + 7) // 8, BLOCK * itemsize // 8, step / divisor
    planes = np.empty(BLOCK, np.uint8)
    places, last = starts[:ranks] + place, np.zeros((ranks, 2), ints.dtype)
    rows, parts = np.empty((BLOCK, ranks)), np.empty(ranks)
    for i in range(blocks, 8 * place):
        out_heads[i] = 0
    for block in range(blocks):
        exactly = False
        for rank in range(ranks):
            exactly |= heads[8 * starts[rank] + block] == RAW
        for i in range(BLOCK):
            total[i + 2] = 0
        for rank in range(ranks):
            byte = heads[8 * starts[rank] + block]
            if byte == RAW:
                first = places[rank] * 8 // itemsize
                for i in range(BLOCK):
                    rows[i, rank] = values[first + i]
                places[rank] += wide
                continue
            ints[0], ints[1] = last[rank, 0], last[rank, 1]
            _decode(byte, words, places[rank], folded, planes, ints)
            last[rank, 0], last[rank, 1] = ints[BLOCK], ints[BLOCK + 1]
            places[rank] += byte & _WIDTH
            if exactly:
                for i in range(BLOCK):
                    rows[i, rank] = ints[i + 2] * step
            else:
                for i in range(BLOCK):
                    total[i + 2] += ints[i + 2]
        byte = RAW
        if not exactly:
            byte = _encode(total, folded, planes, out_words, place)
        out_heads[block] = byte
        if byte == RAW:
            first = place * 8 // itemsize
            for i in range(BLOCK):
                out_values[first + i] = _exact_sum(rows[i], divisor, parts) if exactly else total[i + 2] * factor
            place += wide
        else:
            total[0], total[1] = total[BLOCK], total[BLOCK + 1]
            place += byte & _WIDTH
    return place


@exact
def _exact_sum(numbers, divisor, parts):  # type: ignore[no-untyped-def]
    """Return the sum divided by ``divisor``; before that it is exact, in parts that do not overlap (Shewchuk 1997)."""
    count, plain = 0, 0.0
    for number in numbers:
        plain += number
        more, kept = number * _SCALE, 0
        for j in range(count):
            larger, smaller = (more, parts[j]) if abs(more) >= abs(parts[j]) else (parts[j], more)
            more = larger + smaller
            rest = smaller - (more - larger)
            if rest != 0:
                parts[kept] = rest
                kept += 1
        parts[kept] = more
        count = kept + 1
    result = 0.0
    for j in range(count):
        result += parts[j]
    # NaN where a number was not finite; the plain sum is then NaN or the right infinity.
    return result / divisor / _SCALE if np.isfinite(result) else plain


@exact
def _unpack(message, factor, ints, folded, out):  # type: ignore[no-untyped-def]
    words, heads, values = message
    blocks = (out.size + BLOCK - 1) // BLOCK
    place, wide = (blocks + 7) // 8, BLOCK * out.itemsize // 8
    planes = np.empty(BLOCK, np.uint8)
    for block in range(blocks):
        part, byte = out[block * BLOCK : (block + 1) * BLOCK], heads[block]
        if byte == RAW:
            first = place * 8 // out.itemsize
            for i in range(part.size):
                part[i] = values[first + i]
            place += wide
            continue
        _decode(byte, words, place, folded, planes, ints)
        place += byte & _WIDTH
        ints[0], ints[1] = ints[BLOCK], ints[BLOCK + 1]
        for i in range(part.size):
            part[i] = ints[i + 2] * factor
