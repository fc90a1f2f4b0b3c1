"""A few bits an element: its sign, and one of the levels of its block, which are spaced like the squares of integers.

An element travels as a code of 2, 4 or 8 bits. The highest of them is its sign and the others are a number j; its
magnitude is decoded as ``base + j**2 * step``, where base and step are float32 numbers of its block of 256 elements, of
which the last block may have fewer. Levels are dense at the base and sparse at the end: of elements that were selected
for their size most are just above a threshold, and a few are much larger.

Codes fill bytes from the lowest bits on, and zeros the last word of 8 bytes. Behind them each block has its base and
its step.
"""

from collections.abc import Sequence

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits
from mpicomp.kernels.cpu.compile import Bytes, Floats, Singles, exact, kernel
from mpicomp.kernels.cpu.grid import _real
from mpicomp.kernels.sizes import SQUARES_BLOCK, code_bytes, quadratic_bytes

_LARGEST = float(np.finfo(np.float32).max)
_MAX_END = _LARGEST * (1 - 2.0**-22)  # the last level, computed from a rounded step, must not leave float32
_MIN_NORMAL = float(np.finfo(np.float32).tiny)  # there are devices for which smaller ones are zero


def pack_quadratic(array: Floats, bits: int, out: Bytes, sent: Floats) -> float:
    """Round each magnitude to the nearest level of its block, and return the squared L2 norm of ``array - sent``.

    Levels go from the smallest to the largest magnitude of the block. The first is then moved to the mean of the
    elements that are nearest to it, and the last one likewise. A code has 2, 4 or 8 bits; ``out`` has `quadratic_bytes`
    bytes, aligned to 8. Bases and steps are zero where they would be subnormal, and NaN where an element of the block
    is NaN or infinite; no level is beyond float32. ``sent`` receives the numbers that the receiver will see, and may be
    ``array``.

    No block loses more energy than it has. The mean of the elements nearest to the first level loses no more of them
    than zeros would, all others are larger than it and so nearer to it than to zero, and no element goes to a level
    that is further away than this one.
    """
    codes, scales = _parts(out, array.size, bits)
    return float(_pack_quadratic(array, as_bits(array), bits, codes, scales, sent))


def unpack_quadratic(messages: Bytes, starts: Sequence[int], counts: Sequence[int], bits: int, out: Floats) -> bool:
    """Read several results of `pack_quadratic` into ``out``, in order, with the same bits on every processor.

    They start at ``starts``, bytes of ``messages`` and multiples of 8, and have ``counts`` elements. Return
    False where a base, a step or the last level of a block is no finite number, or one of the first two is negative:
    elements were not finite, or the message is damaged.
    """
    check_places("unpack_quadratic", messages.size, starts, counts, bits, out.size)
    right, place = True, 0
    for start, count in zip(starts, counts, strict=True):
        codes, scales = _parts(messages[start : start + quadratic_bytes(count, bits)], count, bits)
        right = bool(_unpack_quadratic(codes, scales, bits, out[place : place + count])) and right
        place += count
    return right


def check_places(name: str, room: int, starts: Sequence[int], counts: Sequence[int], bits: int, size: int) -> None:
    """Refuse elements that do not fill an array of ``size``, or that do not lie in ``room`` bytes."""
    if sum(counts) != size:
        raise ValueError(f"{name}: {sum(counts)} elements do not fill an array of {size}")
    for start, count in zip(starts, counts, strict=True):
        if start < 0 or start % 8 or start + quadratic_bytes(count, bits) > room:
            raise ValueError(f"{name}: {count} elements from byte {start} on are not in {room} bytes, aligned")


def split_of(nbytes: int, count: int, bits: int) -> int:
    """Return the bytes before the scales; refuse memory of another length than ``count`` elements."""
    if nbytes != quadratic_bytes(count, bits):
        raise ValueError(f"quadratic levels: {count} elements take {quadratic_bytes(count, bits)} bytes, got {nbytes}")
    return code_bytes(count, bits)


def _parts(packed: Bytes, count: int, bits: int) -> tuple[Bytes, Singles]:
    split = split_of(packed.size, count, bits)
    return packed[:split], packed[split:].view(np.float32)


# Blocks are gone through again while they are in the first-level cache, as float64. A product of j**2 and a step is
# exact in it, so that a level is the same number whether or not a processor multiplies and adds in one go.


@kernel
def _magnitudes(array, start, count, wide):  # type: ignore[no-untyped-def]
    for i in range(count):
        wide[i] = abs(np.float64(array[start + i]))


@kernel
def _extremes(keys, count):  # type: ignore[no-untyped-def]
    # The bits of magnitudes, which order like them, with NaN at the end: comparisons that mind NaN do not vectorise.
    least, largest = keys[0], keys[0]
    for i in range(count):
        least, largest = min(least, keys[i]), max(largest, keys[i])
    return _real(least), _real(largest)


@kernel
def _means(wide, count, low_edge, high_edge):  # type: ignore[no-untyped-def]
    low, few, high, many = 0.0, 0.0, 0.0, 0.0
    for i in range(count):  # products with 0 and 1, since branches do not vectorise
        near, far = np.float64(wide[i] <= low_edge), np.float64(wide[i] > high_edge)
        low, few, high, many = low + near * wide[i], few + near, high + far * wide[i], many + far
    first = low / few
    return first, high / many if many > 0 else first


@exact
def _single(value):  # type: ignore[no-untyped-def]
    return np.float32(value) if value >= _MIN_NORMAL else np.float32(0)


@exact
def _scales(wide, keys, count, last):  # type: ignore[no-untyped-def]
    least, largest = _extremes(keys, count)
    if not np.isfinite(largest):
        return np.float32(np.nan), np.float32(np.nan)
    squares, before = np.float64(last * last), np.float64((last - 1) * (last - 1))
    reach = largest - least
    low_edge, high_edge = least + reach * (0.5 / squares), least + reach * (0.5 * (squares + before) / squares)
    first, end = _means(wide, count, low_edge, high_edge)
    base = _single(min(first, _MAX_END))
    return base, _single((min(end, _MAX_END) - np.float64(base)) / squares)


@exact
def _code(wide, bits_of, start, count, base, step, last, bits, codes):  # type: ignore[no-untyped-def]
    low, most = np.float64(base), np.float64(last)
    inverse = 1.0 / np.float64(step) if step > 0 else 0.0
    sign_place = bits_of.dtype.type(8 * bits_of.itemsize - 1)
    for i in range(count):
        # Half-way between j and the next one is j**2 + j + 1/2, which is a quarter more than the square of j + 1/2.
        steps = max((wide[i] - low) * inverse - 0.25, 0.0)
        level = np.int32(min(np.sqrt(steps) + 0.5, most))
        sign = np.int32(bits_of[start + i] >> sign_place)
        codes[i] = np.uint8(level | sign << (bits - 1))


@exact
def _write(codes, count, base, step, last, out, start):  # type: ignore[no-untyped-def]
    number = out.dtype.type
    low, spacing = np.float64(base), np.float64(step)
    for i in range(count):
        level = np.int32(codes[i]) & np.int32(last)
        magnitude = low + np.float64(np.int32(level * level)) * spacing
        out[start + i] = number(-magnitude if np.int32(codes[i]) > np.int32(last) else magnitude)


@kernel
def _lost(wide, sent, start, count):  # type: ignore[no-untyped-def]
    lost = 0.0
    for i in range(count):
        error = wide[i] - abs(np.float64(sent[start + i]))
        lost += error * error
    return lost


@kernel
def _fold(codes, bits, out):  # type: ignore[no-untyped-def]
    each = 8 // bits
    for k in range(out.size):
        byte = 0
        for j in range(each):
            byte |= np.int32(codes[each * k + j]) << (bits * j)
        out[k] = np.uint8(byte)


@kernel
def _unfold(packed, bits, codes):  # type: ignore[no-untyped-def]
    each, mask = 8 // bits, (1 << bits) - 1
    for k in range(packed.size):
        for j in range(each):
            codes[each * k + j] = np.uint8(np.int32(packed[k]) >> (bits * j) & mask)


@kernel
def _pack_quadratic(array, bits_of, bits, packed, scales, sent):  # type: ignore[no-untyped-def]
    wide, codes = np.empty(SQUARES_BLOCK, np.float64), np.zeros(SQUARES_BLOCK, np.uint8)
    keys = wide.view(np.int64)
    last = (1 << (bits - 1)) - 1
    length = SQUARES_BLOCK * bits // 8
    lost = 0.0
    for block in range(scales.size // 2):
        start = block * SQUARES_BLOCK
        count = min(SQUARES_BLOCK, array.size - start)
        _magnitudes(array, start, count, wide)
        base, step = _scales(wide, keys, count, last)
        scales[2 * block], scales[2 * block + 1] = base, step
        if np.isfinite(base):
            _code(wide, bits_of, start, count, base, step, last, bits, codes)
        else:
            codes[:] = 0
        codes[count:] = 0
        _fold(codes, bits, packed[block * length : (block + 1) * length])
        _write(codes, count, base, step, last, sent, start)
        lost += _lost(wide, sent, start, count)
    return lost


@kernel
def _unpack_quadratic(packed, scales, bits, out):  # type: ignore[no-untyped-def]
    codes = np.empty(SQUARES_BLOCK, np.uint8)
    last = (1 << (bits - 1)) - 1
    length = SQUARES_BLOCK * bits // 8
    right = True
    for block in range(scales.size // 2):
        start = block * SQUARES_BLOCK
        base, step = scales[2 * block], scales[2 * block + 1]
        highest = np.float64(base) + np.float64(last * last) * np.float64(step)
        if not (base >= 0 and step >= 0 and highest <= _LARGEST):
            right = False
        _unfold(packed[block * length : (block + 1) * length], bits, codes)
        _write(codes, min(SQUARES_BLOCK, out.size - start), base, step, last, out, start)
    return right
