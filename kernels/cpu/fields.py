"""Integers in fields of 64-bit words, wide enough that sums over ranks stay in their fields.

Ranks round their elements to a grid that they share, add what makes the integers positive, and put them side by side
into words. The sum of the ranks' words then holds the sums of their integers: no field ever runs over into the next.

Words are filled in blocks of `SPAN`, the last one shorter. Field j of the k-th of a block's K words is element
``j * K + k`` of the block, so that neighbouring elements are in neighbouring words and every loop vectorises.
"""

from typing import Any

import numpy as np
from mpicomp.kernels.cpu.bits import draw, halves
from mpicomp.kernels.cpu.compile import Bytes, Floats, Words, exact, kernel
from mpicomp.kernels.sizes import fields_of, width_of

SPAN = 256  # words of a block; with their elements they stay in the first-level cache

_UNIT = np.float32(2.0**-24)


def pack_fields(
    array: Floats,
    inverses: Floats,
    steps: Floats,
    limit: int,
    largest: int,
    key: int | None,
    words: Words,
    sent: Floats,
    levels: Bytes | None = None,
) -> float:
    """Round an array to integers from ``-limit`` to ``limit`` and pack them, ``limit`` added, into fields.

    An element is multiplied by the inverse of its grid, and ``sent`` receives its integer times the step of the grid.
    ``levels`` has the grid of each element; without it all are on the first one, which is the coarsest. Elements beyond
    the ends of a grid are moved to them, NaN to the lower one. ``limit`` is below 2**24, up to which float32 counts;
    ``largest`` is what a sum may reach, ``2 * limit`` times the ranks and below 2**31. With a key of 64 bits rounding
    is random and right on average; without one it is to the nearest, ties to even. Return the squared L2 norm of
    ``array - sent``; NaN or infinite where an element is.
    """
    low, high = (None, None) if key is None else halves(key)
    number = array.dtype.type
    units = _pack_fields(
        array, levels, inverses, steps, number(limit), fields_of(largest), width_of(largest), low, high, words, sent
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(np.float64(steps[0])) * units)


def unpack_fields(
    words: Words, factors: Floats, offset: int, largest: int, out: Floats, levels: Bytes | None = None
) -> None:
    """Write ``(field - offset) * factor`` for each element: the same bits on every processor.

    ``words`` are those of `pack_fields` or a sum of them, ``factors`` has a number for each grid in the dtype of
    ``out``, and ``offset`` is ``limit`` times the ranks whose words were summed.
    """
    _unpack_fields(words, levels, factors, np.int32(offset), fields_of(largest), width_of(largest), out)


def pack_out_of_range(array: Floats, inverse: Any, limit: int, ranks: int, words: Words) -> None:
    """Set the field of every element to 1 whose product with ``inverse`` is beyond ``-limit`` to ``limit``, or NaN.

    ``inverse`` has the dtype of ``array``. A field has room for the ones of all ranks.
    """
    _pack_out_of_range(array, inverse, array.dtype.type(limit), fields_of(ranks), width_of(ranks), words)


def resolve_levels(words: Words, ranks: int, level: int, levels: Bytes) -> None:
    """Set the level of every element whose field is zero in the sum of what `pack_out_of_range` wrote on each rank."""
    _resolve_levels(words, fields_of(ranks), width_of(ranks), np.uint8(level), levels)


@kernel
def _spread(levels, table, out):  # type: ignore[no-untyped-def]
    """Write each element's entry of a table. A pass for each entry vectorises, where looking them up does not."""
    out[: levels.size] = table[0]
    for level in range(1, table.size):
        factor, number = table[level], np.uint8(level)
        for i in range(levels.size):
            out[i] = factor if levels[i] == number else out[i]


@kernel
def _round(part, levels, first, inverses, steps, unit, limit, low, high, codes, sent):  # type: ignore[no-untyped-def]
    number = part.dtype.type
    inverse, step = inverses[0], steps[0]
    missed = number(0)  # in units of the first grid: squares neither vanish nor overflow
    for i in range(part.size):
        if levels is not None:
            inverse, step = inverses[i], steps[i]
        exact = part[i] * inverse
        inside = exact if exact > -limit else -limit  # NaN too
        inside = inside if inside < limit else limit
        if low is None:
            whole = np.rint(inside)
        else:
            # Adding the random number before cutting would lose the last bits of what is added to.
            below = np.floor(inside)
            drawn = draw(np.uint32(first + np.uint32(i)), low, high) >> np.uint32(8)
            share = np.float32(np.int32(drawn)) * _UNIT
            whole = below + (number(1) if inside - below > share else number(0))
        codes[i] = np.uint32(np.int32(whole + limit))
        sent[i] = whole * step
        error = (part[i] - sent[i]) * unit
        missed += error * error
    return np.float64(missed)


@kernel
def _pack_fields(array, levels, inverses, steps, limit, fields, width, low, high, words, sent):  # type: ignore[no-untyped-def]
    codes = np.empty(SPAN, np.uint32)
    grid = np.empty((2, SPAN), array.dtype)
    units = 0.0
    for place in range(0, words.size, SPAN):
        span = words[place : place + SPAN]
        span[:] = 0
        for field in range(fields):
            first = place * fields + field * span.size
            last = min(first + span.size, array.size)
            if first >= last:
                break
            if levels is None:
                units += _round(
                    array[first:last], None, np.uint32(first), inverses, steps, inverses[0], limit, low, high, codes,
                    sent[first:last],
                )  # fmt: skip
            else:
                _spread(levels[first:last], inverses, grid[0])
                _spread(levels[first:last], steps, grid[1])
                units += _round(
                    array[first:last], levels, np.uint32(first), grid[0], grid[1], inverses[0], limit, low, high,
                    codes, sent[first:last],
                )  # fmt: skip
            shift = np.uint64(field * width)
            for k in range(last - first):
                span[k] |= np.uint64(codes[k]) << shift
    return units


@exact
def _unpack_fields(words, levels, factors, offset, fields, width, out):  # type: ignore[no-untyped-def]
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    factor = factors[0]
    grid = np.empty(SPAN, out.dtype)
    for place in range(0, words.size, SPAN):
        span = words[place : place + SPAN]
        for field in range(fields):
            first = place * fields + field * span.size
            shift = np.uint64(field * width)
            if levels is not None:
                _spread(levels[first : first + span.size], factors, grid)
            for k in range(min(span.size, out.size - first)):
                if levels is not None:
                    factor = grid[k]
                total = np.int32(np.int32((span[k] >> shift) & mask) - offset)
                out[first + k] = out.dtype.type(total) * factor


@kernel
def _pack_out_of_range(array, inverse, limit, fields, width, words):  # type: ignore[no-untyped-def]
    for place in range(0, words.size, SPAN):
        span = words[place : place + SPAN]
        span[:] = 0
        for field in range(fields):
            first = place * fields + field * span.size
            shift = np.uint64(field * width)
            for k in range(min(span.size, array.size - first)):
                objects = not abs(array[first + k] * inverse) <= limit
                span[k] |= np.uint64(objects) << shift


@kernel
def _resolve_levels(words, fields, width, level, levels):  # type: ignore[no-untyped-def]
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    objects = np.empty(SPAN, np.uint32)
    for place in range(0, words.size, SPAN):
        span = words[place : place + SPAN]
        for field in range(fields):
            first = place * fields + field * span.size
            shift = np.uint64(field * width)
            part = levels[first : first + span.size]
            # Narrowed in two steps, and chosen by a product: so both loops vectorise, and no branch is mispredicted.
            for k in range(part.size):
                objects[k] = np.uint32((span[k] >> shift) & mask)
            for k in range(part.size):
                stays = np.uint8(objects[k] != np.uint32(0))
                part[k] = part[k] * stays + level * (np.uint8(1) - stays)
