"""Exact selection of the largest magnitudes; equal ones go to the lowest index."""

from enum import IntEnum
from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.compile import WARPS, launch, library, on_device, scalar_arg, sweeps, tiles, twin_of, word_of

DIGIT = 11  # bits of a digit of the radix selection
BLOCKS = 528  # of sweeps that often have little to do: 4 for each of an H200's multiprocessors keep its memory busy
BINS = 1 << DIGIT


class Field(IntEnum):
    """Places in the state that a selection keeps on the device, all of 64 bits."""

    CANDIDATES, TICKET, USABLE, KNOWN, REMAINING, THRESHOLD, TIES, OFFSET, END, LISTED, GAP, EXACT, K = range(13)


class Source(IntEnum):
    """Source of the elements to select."""

    ARRAY, AS_STATE_SAYS, LIST_IF_COMPLETE, LIST = range(4)


class Rule(IntEnum):
    """Rule for elements equal to the threshold: select none, all, or as many as fill the room."""

    ABOVE, REACH, FILL = range(3)


class Turn(IntEnum):
    """Condition on `Field.EXACT` under which a launch does anything."""

    ALWAYS, UNLESS_EXACT, IF_EXACT = range(3)


def digits(dtype: Any) -> list[tuple[int, int]]:
    """Return shift and width of the digits of a radix selection, the most significant first."""
    found, shift = [], 8 * np.dtype(dtype).itemsize - 1
    while shift > 0:
        width = min(DIGIT, shift)
        shift -= width
        found.append((shift, width))
    return found


@twin_of(cpu.magnitude_bits)
def magnitude_bits(value, dtype):
    if not on_device(value):
        return cpu.magnitude_bits(value, dtype)
    return value.reshape(1).astype(dtype).view(word_of(dtype)).astype(np.uint64)[0]


@twin_of(cpu.magnitude_of)
def magnitude_of(bits, dtype):
    if not on_device(bits):
        return cpu.magnitude_of(bits, dtype)
    return bits.reshape(1).astype(word_of(dtype)).view(dtype).astype(np.float64)[0]


@twin_of(cpu.kth_magnitude)
def kth_magnitude(array, k):
    return _radix(array, k)[Field.THRESHOLD]


@twin_of(cpu.select_largest)
def select_largest(array, threshold, indices, values):
    compact(array, threshold, Rule.FILL, indices, values=values)


@twin_of(cpu.select_candidates)
def select_candidates(index, bits, scratch, array, indices, values):
    threshold = _radix(bits.view(array.dtype), indices.size)[Field.THRESHOLD]
    compact(array, threshold, Rule.FILL, indices, values=values, candidates=(index, bits))
    return threshold


@twin_of(cpu.select_above)
def select_above(array, threshold, base, indices, values, count):
    threshold = magnitude_bits(threshold, array.dtype)
    return compact(array, threshold, Rule.ABOVE, indices, values=values, base=base, offset=count)


@twin_of(cpu.select_listed)
def select_listed(index, listed, threshold, array, indices, values):
    threshold = magnitude_bits(threshold, array.dtype)
    return compact(array, threshold, Rule.ABOVE, indices, values=values, candidates=(index, listed))


def compact(
    array: Any,
    threshold: Any,
    rule: Rule,
    indices: Any,
    values: Any = 0,
    magnitudes: Any = 0,
    base: int = 0,
    offset: Any = 0,
    candidates: tuple[Any, Any] | None = None,
) -> Any:
    """Write the elements that reach a threshold, ascending by index, in two launches.

    ``threshold`` is magnitude bits, and ``values`` and ``magnitudes`` receive the elements and their magnitude bits.
    ``base`` is added to positions. ``offset`` is the place in the outputs to start at; elements that do not fit are
    counted only. ``candidates`` are ascending indices and magnitude bits to select among. Return ``offset`` plus the
    number of elements.
    """
    state = library().zeros(len(Field), np.uint64)
    index, bits = candidates or (0, 0)
    size = candidates[0].size if candidates else array.size
    number = tiles(size, array.dtype)
    of_tiles, before = counters_of_tiles(number)
    count_tiles(
        array, size, bits, 0, 0, 0, Source.LIST if candidates else Source.ARRAY,
        (0, 0), scalar_arg(threshold, np.uint64), rule, (0, indices.size), scalar_arg(offset, np.int64),
        number, of_tiles, before, state,
    )  # fmt: skip
    write_tiles(
        array, size, index, bits, 0, 0, number, of_tiles, before, state, base, indices,
        values=values, magnitudes=magnitudes,
    )  # fmt: skip
    return state.view(np.int64)[Field.END]


def counters_of_tiles(number: int) -> tuple[Any, Any]:
    """Allocate the counters that `count_tiles` leaves for `write_tiles`: by tile, and by block."""
    return library().empty(number, np.uint64), library().empty(max(1, -(-number // WARPS)), np.uint64)


def count_tiles(
    array: Any, size: int, bits: Any, listable: int, starts: Any, counts: Any, source: Source,
    bound: tuple[Any, int], threshold: tuple[Any, int], rule: Rule, room: tuple[Any, int], offset: tuple[Any, int],
    number: int, of_tiles: Any, before: Any, state: Any, turn: Turn = Turn.ALWAYS,
) -> None:  # fmt: skip
    """Launch the kernel of that name, with a warp for every tile."""
    launch(
        "select", "count_tiles", array.dtype, -(-number // WARPS),
        array, size, bits, listable, starts, counts, int(source), *bound, *threshold, int(rule), *room, *offset,
        int(turn), number, of_tiles, before, state,
    )  # fmt: skip


def write_tiles(
    array: Any, size: int, index: Any, bits: Any, starts: Any, counts: Any, number: int, of_tiles: Any, before: Any,
    state: Any, base: int, indices: Any, values: Any = 0, magnitudes: Any = 0,
    bound: Any = 0, following: Any = 0, listable: int = 0, margin: float = 0.0, count: Any = 0,
) -> None:  # fmt: skip
    """Launch the kernel of that name, with a warp for every tile."""
    launch(
        "select", "write_tiles", array.dtype, -(-number // WARPS),
        array, size, index, bits, starts, counts, number, of_tiles, before, state, base, indices.size,
        indices, values, magnitudes, bound, following, listable, margin, count,
    )  # fmt: skip


def radix(
    array: Any, bits: Any, room: int, bound: Any, k: tuple[Any, int], counters: Any, state: Any,
    turn: Turn = Turn.ALWAYS,
) -> None:  # fmt: skip
    """Launch the passes of a radix selection, on listed candidates where they turn out to be enough."""
    for place, (shift, width) in enumerate(digits(array.dtype)):
        launch(
            "select", "histogram", array.dtype, min(BLOCKS, sweeps(array.size, array.dtype)),
            array, array.size, bits, room, bound, *k, shift, width, int(place == 0), int(turn), counters, state,
        )  # fmt: skip


def _radix(array: Any, k: int) -> Any:
    memory = library().zeros(BINS + len(Field), np.uint64)
    counters, state = memory[:BINS], memory[BINS:]
    radix(array, 0, 0, 0, (0, k), counters, state)
    return state
