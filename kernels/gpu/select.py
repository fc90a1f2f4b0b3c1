"""Exact selection of the largest magnitudes; equal ones go to the lowest index."""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.compile import WARPS, launch, library, on_device, scalar_arg, sweeps, tiles, twin_of, word_of

DIGIT = 11  # bits of a digit of the radix selection
BLOCKS = 528  # of sweeps that often have little to do: 4 for each of an H200's multiprocessors keep its memory busy
BINS = 1 << DIGIT
_MARGIN = 0.8  # the first bound for candidates, as a fraction of the threshold of the step before


class Field(IntEnum):
    """Places in the state that a selection keeps on the device, all of 64 bits."""

    CANDIDATES, TICKET, USABLE, KNOWN, REMAINING, THRESHOLD, TIES, OFFSET, END, LISTED, GAP, EXACT, K = range(13)


class Source(IntEnum):
    """Source of the elements to select."""

    ARRAY, LIST_IF_USABLE, LIST_IF_COMPLETE = range(3)


class Rule(IntEnum):
    """Rule for elements equal to the threshold: select none, or as many as fill the room."""

    ABOVE, FILL = range(2)


class Condition(IntEnum):
    """Condition on `Field.EXACT` under which a launch does anything."""

    ALWAYS, UNLESS_EXACT, IF_EXACT = range(3)


class Tiles(NamedTuple):
    """Tiles of an array, their counters and the state, which `count_tiles` leaves for `write_tiles`."""

    size: int  # elements
    number: int
    of_tiles: Any  # counters by tile
    before: Any  # counters by block
    state: Any


class Listing(NamedTuple):
    """Elements that a sweep has listed, tile by tile in the order in which tiles end."""

    index: Any = 0
    bits: Any = 0
    starts: Any = 0  # of each tile
    counts: Any = 0  # of each tile
    room: int = 0


class Target(NamedTuple):
    """Elements to select."""

    threshold: tuple[Any, int]  # magnitude bits
    rule: Rule
    room: tuple[Any, int]


class Message(NamedTuple):
    """A message that a launch fills with a selection: its format is that of `mpicomp.compressors.wire`."""

    memory: Any = 0  # all zeros
    lead: int = 0  # the first word of a message of plain indices and no elements
    least: int = 0  # indices that are coded
    most: int = 0  # bytes of a coded index


class Output(NamedTuple):
    """Arrays that receive a selection; a count of 0 is not wanted. Values lie in the message, if there is one."""

    indices: Any
    values: Any
    count: Any = 0
    message: Message = Message()


def tiles_of(size: int, dtype: Any) -> Tiles:
    """Allocate the counters and the state of ``size`` elements' tiles."""
    cupy, number = library(), tiles(size, dtype)
    return Tiles(size, number, *counters_of_tiles(number), cupy.zeros(len(Field), np.uint64))


def counters_of_tiles(number: int) -> tuple[Any, Any]:
    """Allocate the counters of tiles: by tile, and by block."""
    return library().empty(number, np.uint64), library().empty(max(1, -(-number // WARPS)), np.uint64)


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
    memory = library().zeros(BINS + len(Field), np.uint64)
    counters, state = memory[:BINS], memory[BINS:]
    radix(array, 0, 0, 0, (0, k), counters, state)
    return state[Field.THRESHOLD]


@twin_of(cpu.select_largest)
def select_largest(array, threshold, indices, values):
    compact(array, threshold, Rule.FILL, indices, values)


@twin_of(cpu.select_above)
def select_above(array, threshold, base, indices, values, count):
    threshold = magnitude_bits(threshold, array.dtype)
    return compact(array, threshold, Rule.ABOVE, indices, values, base, count)


def compact(array: Any, threshold: Any, rule: Rule, indices: Any, values: Any, base: int = 0, offset: Any = 0) -> Any:
    """Write the elements that reach a threshold, in magnitude bits, ascending by index, in two launches.

    ``base`` is added to positions. ``offset`` is the place in the outputs to start at; elements that do not fit are
    counted only. Return ``offset`` plus the number of elements.
    """
    tiled = tiles_of(array.size, array.dtype)
    target = Target(scalar_arg(threshold, np.uint64), rule, (0, indices.size))
    count_tiles(array, tiled, Listing(), Source.ARRAY, target, offset=scalar_arg(offset, np.int64))
    write_tiles(array, tiled, Listing(), Output(indices, values), base)
    return tiled.state.view(np.int64)[Field.END]


def count_tiles(
    array: Any, tiled: Tiles, listing: Listing, source: Source, target: Target,
    bound: tuple[Any, int] = (0, 0), offset: tuple[Any, int] = (0, 0), condition: Condition = Condition.ALWAYS,
) -> None:  # fmt: skip
    """Launch the kernel of that name, with a warp for every tile."""
    launch(
        "select", "count_tiles", array.dtype, -(-tiled.number // WARPS),
        array, tiled.size, listing.bits, listing.room, listing.starts, listing.counts, int(source), *bound,
        *target.threshold, int(target.rule), *target.room, *offset, int(condition), *tiled[1:],
    )  # fmt: skip


def write_tiles(
    array: Any, tiled: Tiles, listing: Listing, output: Output, base: int = 0,
    bound: tuple[Any, Any] = (0, 0), sums: tuple[Any, Any] = (0, 0),
) -> None:  # fmt: skip
    """Launch the kernel of that name, with a warp for every tile.

    ``bound`` has this step's and where the next one goes, ``sums`` the moments of the array and memory for a message's.
    """
    launch(
        "select", "write_tiles", array.dtype, -(-tiled.number // WARPS),
        array, tiled.size, *listing[:4], *tiled[1:], base, output.indices.size, *output[:3],
        *bound, listing.room, _MARGIN, *output.message, *sums,
    )  # fmt: skip


def radix(
    array: Any, bits: Any, room: int, bound: Any, k: tuple[Any, int], counters: Any, state: Any,
    condition: Condition = Condition.ALWAYS,
) -> None:  # fmt: skip
    """Launch the passes of a radix selection, on listed candidates where they condition out to be enough."""
    for place, (shift, width) in enumerate(digits(array.dtype)):
        launch(
            "select", "histogram", array.dtype, min(BLOCKS, sweeps(array.size, array.dtype)),
            array, array.size, bits, room, bound, *k, shift, width, int(place == 0), int(condition), counters, state,
        )  # fmt: skip
