"""A few bits an element: its place on a grid of equal steps that each bucket of elements has for itself.

An element travels as a code of b bits and is decoded as ``base + (code - offset) * step``, where base and step are
float32 numbers of its bucket. A symmetric grid has ``2 * offset + 1`` points around zero, with ``offset`` being
``2**(b-1) - 1``, and no base; one between the extremes of a bucket has ``2**b``, and no offset. Codes travel in bit
planes, see `mpicomp.kernels.cpu.bit_planes`. Buckets are multiples of 64 elements long, but for the last one.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from mpicomp.kernels.cpu.bit_planes import read_planes, write_planes
from mpicomp.kernels.cpu.bits import draw, halves
from mpicomp.kernels.cpu.cast import _to_float32
from mpicomp.kernels.cpu.compile import Floats, Singles, Words, exact, kernel
from mpicomp.kernels.cpu.simd import LANES
from numba import types
from numba.extending import intrinsic

_BLOCK = 1024  # elements that are gone through again while they are in the first-level cache

# Places on the grid are numbers with this many bits after the point: with 8 before it they fill an int32. A float32
# has no more of them between 1 and 2, so nothing is lost but the part below the last one.
_FRACTION = 23
_ONE = 1 << _FRACTION
_HALF = np.int32(_ONE // 2)
_INTEGER_BITS = np.uint32(32 - _FRACTION)

# The ends of a grid are computed as multiples of its step, which was rounded: they must not leave float32.
_MAX_END = float(np.finfo(np.float32).max) * (1 - 2.0**-22)


def pack_grid(
    array: Floats, bucket: int, bits: int, norm: str, steps: Singles, words: Words, sent: Floats, key: int | None = None
) -> float:
    """Round to a symmetric grid that reaches as far as the norm of each bucket.

    A bucket has a multiple of 64 elements, and a code from 2 to 8 bits. The last point of the grid stands for the
    largest magnitude of the bucket ("max") or for its L2 norm ("l2"). ``steps`` receives NaN where an element of the
    bucket is NaN or infinite, and 0 where the norm is 0 or the step has no inverse; norms beyond float32 become nearly
    the largest number. ``words`` receives the codes, and zeros after the last element; ``sent`` receives the numbers
    that the receiver will see. With a key of 64 bits elements are rounded at random, right on average but for 2**-23 of
    a step; without one to the nearest point. Return the squared L2 norm of ``array - sent``; NaN where an element is
    NaN or infinite.
    """
    return _packed(array, bucket, bits, norm == "l2", None, steps, words, sent, key)


def pack_range(
    array: Floats,
    bucket: int,
    bits: int,
    bases: Singles,
    steps: Singles,
    words: Words,
    sent: Floats,
    key: int | None = None,
) -> float:
    """Round to a grid that reaches from the least to the largest element of each bucket; see `pack_grid`.

    A code has from 1 to 8 bits. ``bases`` receives the least elements. A range beyond float32 ends early. Where it is
    so small that the step has no inverse, the step is 0 and the base is the number in the range that is nearest to
    zero.
    """
    return _packed(array, bucket, bits, False, bases, steps, words, sent, key)


def unpack_grid(bases: Singles | None, steps: Singles, words: Words, bucket: int, bits: int, out: Floats) -> None:
    """Decode the codes of `pack_grid` (without bases) or `pack_range` to an array of their number."""
    _unpack_grid(bases, steps, words, bucket, bits, None, out)


def unpack_grid_add(
    bases: Singles | None, steps: Singles, words: Words, bucket: int, bits: int, factor: float, out: Floats
) -> None:
    """Add ``factor`` times the packed array; it multiplies bases and steps in float64, before they are rounded."""
    _unpack_grid(bases, steps, words, bucket, bits, factor, out)


def _packed(
    array: Floats,
    bucket: int,
    bits: int,
    euclidean: bool,
    bases: Singles | None,
    steps: Singles,
    words: Words,
    sent: Floats,
    key: int | None,
) -> float:
    halves_of_key = None if key is None else halves(key)
    keys = array.view(_SIGNED[array.dtype])
    return float(_pack_grid(array, keys, bucket, bits, euclidean, bases, steps, words, sent, halves_of_key))


_SIGNED: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.int32),
    np.dtype(np.float64): np.dtype(np.int64),
}


@intrinsic
def _real(typingctx: Any, bits: Any) -> Any:
    real = types.float32 if bits.bitwidth == 32 else types.float64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(real))

    return real(bits), generate


# Loops start and stop at unsigned numbers: such an index needs no check of its sign, and slices
# of arrays would take as long as the loop over a short bucket.


@kernel
def _symmetric(array, keys, euclidean, points, start, stop):  # type: ignore[no-untyped-def]
    # NaN and infinity show in the largest magnitude; in float64 a sum of squares may leave the range without it.
    integer = keys.dtype.type
    magnitudes, top = integer(np.iinfo(keys.dtype).max), integer(0)
    for i in range(start, stop):
        top = max(top, integer(keys[i] & magnitudes))
    largest = _real(top)
    if not np.isfinite(largest):
        return np.float32(np.nan)
    if not euclidean:
        return np.float32(min(np.float64(largest), _MAX_END) / points)
    energy = 0.0
    for i in range(start, stop):
        energy += np.float64(array[i]) * np.float64(array[i])
    return np.float32(min(math.sqrt(energy), _MAX_END) / points)


@kernel
def _extremes(keys, start, stop):  # type: ignore[no-untyped-def]
    # Bits of floats order like the floats, with NaN at both ends, where all but the sign of a negative one's are turned
    # round. Integers are compared since comparisons that mind NaN do not vectorise.
    integer = keys.dtype.type
    flipped = integer(np.iinfo(keys.dtype).max)
    least, largest = flipped, integer(~flipped)
    for i in range(start, stop):
        key = integer(keys[i] ^ flipped) if keys[i] < 0 else keys[i]
        least, largest = min(least, key), max(largest, key)
    least = integer(least ^ flipped) if least < 0 else least
    largest = integer(largest ^ flipped) if largest < 0 else largest
    return _real(least), _real(largest)


@kernel
def _inverse(array, step):  # type: ignore[no-untyped-def]
    # In the array's dtype. 0 stands for one that is too large: it takes every element to the offset.
    number = array.dtype.type
    inverse = number(1) / number(step) if step > 0 else number(0)
    return inverse if np.isfinite(inverse) else number(0)


@kernel
def _between(array, least, largest, points):  # type: ignore[no-untyped-def]
    if not (np.isfinite(least) and np.isfinite(largest)):
        return np.float32(np.nan), np.float32(np.nan)
    base = _to_float32(least)
    step = np.float32(min(np.float64(largest) - np.float64(base), _MAX_END) / points)
    if _inverse(array, step) == 0:
        return _to_float32(min(max(least, 0), largest)), np.float32(0)
    return base, step


@kernel
def _code(array, start, stop, base, step, points, offset, key, codes, place):  # type: ignore[no-untyped-def]
    number = array.dtype.type
    inverse, lowest, highest = _inverse(array, step), number(-offset), number(points - offset)
    for i in range(start, stop):
        steps = min(max((array[i] - base) * inverse, lowest), highest)
        fixed = np.int32(steps * number(_ONE))
        if key is None:
            fixed = np.int32(fixed + _HALF)
        else:
            fixed = np.int32(fixed + np.int32(np.uint32(draw(i, key[0], key[1]) >> _INTEGER_BITS)))
        codes[i - start + place] = np.uint8(np.int32(np.int32(fixed >> _FRACTION) + offset))


@kernel
def _lost(array, sent, start, stop):  # type: ignore[no-untyped-def]
    lost = 0.0
    for i in range(start, stop):
        error = np.float64(array[i]) - np.float64(sent[i])
        lost += error * error
    return lost


# Computed by several ranks for themselves, with the same bits on each.


@exact
def _write(codes, place, base, step, offset, out, start, stop, add):  # type: ignore[no-untyped-def]
    number = out.dtype.type
    for i in range(start, stop):
        value = base + number(np.int32(np.int32(codes[i - start + place]) - offset)) * step
        out[i] = value if add is None else out[i] + value


# Packing goes block by block, each of which stays in the first-level cache. A block is as many buckets as
# fit in it, or a part of one: codes are written in small pieces, and the processor waits where it reads them in large
# ones soon after.


class _Grid(NamedTuple):
    steps: Singles
    bucket: int
    bits: int
    points: np.int32
    offset: np.int32


@kernel
def _pack(array, first, last, bases, grid, words, sent, key, codes):  # type: ignore[no-untyped-def]
    number, bucket, bits, steps = array.dtype.type, grid.bucket, grid.bits, grid.steps
    for which in range(first // bucket, (last - 1) // bucket + 1):
        start, stop = max(first, which * bucket), min(last, (which + 1) * bucket)
        if np.isfinite(steps[which]):
            base, step = number(0) if bases is None else number(bases[which]), number(steps[which])
            place = np.uintp(start - first)
            _code(array, np.uintp(start), np.uintp(stop), base, step, grid.points, grid.offset, key, codes, place)
        else:
            codes[start - first : stop - first] = grid.offset
    groups = (last - first + LANES - 1) // LANES
    for i in range(last - first, groups * LANES):
        codes[i] = 0
    write_planes(codes, groups, bits, words, first // LANES * bits)
    for which in range(first // bucket, (last - 1) // bucket + 1):
        start, stop = max(first, which * bucket), min(last, (which + 1) * bucket)
        base, step = number(0) if bases is None else number(bases[which]), number(steps[which])
        _write(codes, np.uintp(start - first), base, step, grid.offset, sent, np.uintp(start), np.uintp(stop), None)
    return _lost(array, sent, np.uintp(first), np.uintp(last))


@kernel
def _pack_grid(array, keys, bucket, bits, euclidean, bases, steps, words, sent, key):  # type: ignore[no-untyped-def]
    codes = np.empty(_BLOCK, np.uint8)
    offset = _offset_of(bases, bits)
    points = np.int32((1 << bits) - 1 if bases is not None else 2 * offset)
    grid = _Grid(steps, bucket, bits, points, offset)
    block = _BLOCK // bucket * bucket if bucket <= _BLOCK else _BLOCK
    lost = 0.0
    for first in range(0, array.size, block):
        last = min(first + block, array.size)
        for which in range((first + bucket - 1) // bucket, (last - 1) // bucket + 1):  # that begin here
            start, stop = np.uintp(which * bucket), np.uintp(min((which + 1) * bucket, array.size))
            if bases is None:
                steps[which] = _symmetric(array, keys, euclidean, offset, start, stop)
            else:
                least, largest = _extremes(keys, start, stop)
                bases[which], steps[which] = _between(array, least, largest, points)
        lost += _pack(array, first, last, bases, grid, words, sent, key, codes)
    return lost


@kernel
def _offset_of(bases, bits):  # type: ignore[no-untyped-def]
    return np.int32(0 if bases is not None else (1 << (bits - 1)) - 1)


@exact
def _unpack_grid(bases, steps, words, bucket, bits, factor, out):  # type: ignore[no-untyped-def]
    number, codes = out.dtype.type, np.empty(_BLOCK, np.uint8)
    offset = _offset_of(bases, bits)
    for which in range(steps.size):
        base = number(0) if bases is None else number(bases[which] if factor is None else factor * bases[which])
        step = number(steps[which] if factor is None else factor * steps[which])
        stop = min((which + 1) * bucket, out.size)
        for first in range(which * bucket, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            read_planes(words, first // LANES * bits, (last - first + LANES - 1) // LANES, bits, codes)
            _write(codes, np.uintp(0), base, step, offset, out, np.uintp(first), np.uintp(last), factor)
