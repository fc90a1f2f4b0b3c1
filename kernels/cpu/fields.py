"""Integers in fields of 64-bit words, wide enough that sums over ranks stay in their fields.

Ranks round their elements to a grid that they share, add what makes the integers positive, and put them side by side
into words. The sum of the ranks' words then holds the sums of their integers: no field ever runs over into the next.

Words are filled in blocks of `SPAN`, the last one shorter. Field j of the k-th of a block's K words is element
``j * K + k`` of the block, so that neighbouring elements are in neighbouring words and every loop vectorises.
"""

from typing import Any

import numpy as np
from mpicomp.kernels.cpu.compile import exact, kernel
from mpicomp.kernels.cpu.random import draw, halves
from mpicomp.kernels.sizes import fields_of, width_of
from numpy.typing import NDArray

SPAN = 256
"""Words of a block; with their elements they stay in the first-level cache."""

_UNIT = np.float32(2.0**-24)


def pack_fields(
    array: NDArray[np.floating],
    inverses: NDArray[np.floating],
    steps: NDArray[np.floating],
    limit: int,
    largest: int,
    key: int | None,
    words: NDArray[np.uint64],
    sent: NDArray[np.floating],
    levels: NDArray[np.uint8] | None = None,
) -> float:
    """Round an array to integers from ``-limit`` to ``limit`` and pack them, ``limit`` added, into fields.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64, contiguous. What lies beyond the ends of the grid is taken to them, NaN to the lower one.
    inverses, steps : arrays, shape (grids,)
        What elements are multiplied by, and the distance of two points, in the dtype of ``array``. Of several grids the
        first is the coarsest.
    limit : int
        Below 2**24, up to which float32 counts.
    largest : int
        What a field may come to hold: ``2 * limit`` times the ranks; below 2**31.
    key : int or None
        64 bits for rounding at random, which is right on the average; None rounds to the nearest, ties to even.
    words : array of uint64, shape (words_of(n, largest),)
        Receives the fields; those behind the last element are zero.
    sent : array, shape (n,)
        Receives the integers times their steps.
    levels : array of uint8, shape (n,), optional
        Each element's grid; if not given, all are on the first.

    Returns
    -------
    float
        Squared L2 norm of ``array - sent``; NaN or infinite where an element is.

    Examples
    --------
    >>> import numpy as np
    >>> array, words, sent = np.array([-4, 1.5, 4], np.float32), np.empty(1, np.uint64), np.empty(3, np.float32)
    >>> step = np.ones(1, np.float32)
    >>> pack_fields(array, step, step, 4, 15, None, words, sent), sent.tolist(), hex(words[0])
    (0.25, [-4.0, 2.0, 4.0], '0x860')
    """
    low, high = (None, None) if key is None else halves(key)
    number = array.dtype.type
    units = _pack_fields(
        array, levels, inverses, steps, number(limit), fields_of(largest), width_of(largest), low, high, words, sent
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(np.float64(steps[0])) * units)


def unpack_fields(
    words: NDArray[np.uint64],
    factors: NDArray[np.floating],
    offset: int,
    largest: int,
    out: NDArray[np.floating],
    levels: NDArray[np.uint8] | None = None,
) -> None:
    """Write ``(field - offset) * factor`` for each element.

    Parameters
    ----------
    words : array of uint64
        As `pack_fields` has left them, or the sum of several such.
    factors : array, shape (grids,)
        Of each grid, in the dtype of ``out``.
    offset : int
        ``limit`` times the ranks whose words were summed.
    largest : int
        As in `pack_fields`.
    out : array, shape (n,)
        float32 or float64. Every processor makes the same bits of it.
    levels
        As in `pack_fields`.

    Examples
    --------
    >>> import numpy as np
    >>> out = np.empty(3, np.float32)
    >>> unpack_fields(np.array([0x860], np.uint64), np.array([0.5], np.float32), 4, 15, out)
    >>> out.tolist()
    [-2.0, 1.0, 2.0]
    """
    _unpack_fields(words, levels, factors, np.int32(offset), fields_of(largest), width_of(largest), out)


def pack_out_of_range(
    array: NDArray[np.floating], inverse: Any, limit: int, ranks: int, words: NDArray[np.uint64]
) -> None:
    """Put a 1 into the field of every element that is beyond the ends of a grid, before it is rounded.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64, contiguous.
    inverse : number of the same dtype
        Factor of the elements.
    limit : int
        An element stays where its product is from ``-limit`` to ``limit``; NaN does not.
    ranks : int
        How many 1 a field has to hold.
    words : array of uint64, shape (words_of(n, ranks),)
        Receives the fields.
    """
    _pack_out_of_range(array, inverse, array.dtype.type(limit), fields_of(ranks), width_of(ranks), words)


def resolve_levels(words: NDArray[np.uint64], ranks: int, level: int, levels: NDArray[np.uint8]) -> None:
    """Set the level of every element to which nobody has objected.

    Parameters
    ----------
    words : array of uint64
        The sum of what `pack_out_of_range` wrote on each rank.
    ranks : int
        As there.
    level : int
        The grid that was asked about.
    levels : array of uint8, shape (n,)
        Changed where the field is zero.
    """
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
