"""Sorted selections: their sum, difference and common part, and the largest of them."""

from enum import IntEnum
from typing import Any

import numpy as np
from mpicomp.kernels.gpu.bits import given
from mpicomp.kernels.gpu.compile import WARPS, launch, library, strides, tiles
from mpicomp.kernels.gpu.reduce import Partials
from mpicomp.kernels.gpu.select import Field, Rule, Source, count_tiles, counters_of_tiles

PART = 256  # places in the order of two lists that a warp goes through


class Operation(IntEnum):
    """What is made of two selections."""

    ADD, SUBTRACT, COMMON = range(3)


def merge_add(
    indices_a: Any, values_a: Any, indices_b: Any, values_b: Any, out_indices: Any, out_values: Any
) -> Any:  # fmt: skip
    """Write the union of two selections, with sums; see `mpicomp.kernels.cpu.merge_add`.

    The length is a 0-d device array.
    """
    room = indices_a.size + indices_b.size
    _check_room("merge_add", room, out_indices, out_values)
    first, second = (indices_a, values_a, indices_a.size), (indices_b, values_b, indices_b.size)
    return _merge(Operation.ADD, first, second, room, out_indices, out_values)


def merge_subtract(
    indices_a: Any, values_a: Any, indices_b: Any, values_b: Any, out_indices: Any, out_values: Any
) -> Any:  # fmt: skip
    """Subtract one selection from another, zeros left out; see `mpicomp.kernels.cpu.merge_subtract`.

    The length is a 0-d device array.
    """
    room = indices_a.size + indices_b.size
    _check_room("merge_subtract", room, out_indices, out_values)
    first, second = (indices_a, values_a, indices_a.size), (indices_b, values_b, indices_b.size)
    return _merge(Operation.SUBTRACT, first, second, room, out_indices, out_values)


def intersect(indices_a: Any, values_a: Any, indices_b: Any, out_indices: Any, out_values: Any) -> Any:
    """Write what of a selection is in another list, too; see `mpicomp.kernels.cpu.intersect`.

    The length is a 0-d device array.
    """
    room = min(indices_a.size, indices_b.size)
    _check_room("intersect", room, out_indices, out_values)
    first, second = (indices_a, values_a, indices_a.size), (indices_b, 0, indices_b.size)
    return _merge(Operation.COMMON, first, second, room, out_indices, out_values)


def count_reaching(values: Any, threshold: Any) -> Any:
    """Count the values whose magnitude bits are at least ``threshold``, a number or a 0-d device array."""
    *_, state = _count(values, threshold, Rule.REACH, 0)
    return state.view(np.int64)[Field.END]


def split_largest(
    indices: Any, values: Any, threshold: Any, kept_indices: Any, kept_values: Any, left_indices: Any,
    left_values: Any,
) -> None:  # fmt: skip
    """Part a selection into its largest elements and the others; see `mpicomp.kernels.cpu.split_largest`.

    ``threshold`` may be a 0-d device array. How many elements reach it is known on the device only: where that does
    not fit, nothing is raised, and the outputs hold anything.

    Raises
    ------
    ValueError
        Where the outputs do not have room for all elements together, or for more.
    """
    kept = kept_indices.size
    if left_indices.size != values.size - kept:
        raise ValueError(f"split_largest: {values.size} elements, not {kept} and {left_indices.size}")
    number, of_tiles, before, state = _count(values, threshold, Rule.FILL, kept)
    launch(
        "merge", "split_tiles", values.dtype, -(-number // WARPS),
        indices, values, values.size, number, of_tiles, before, state,
        kept_indices, kept_values, kept, left_indices, left_values, left_indices.size,
    )  # fmt: skip


def norm_change(array: Any, indices: Any, sent: Any) -> Any:
    """Return the change of the squared L2 norm, as a 0-d device array; see `mpicomp.kernels.cpu.norm_change`.

    Elements whose index is out of range count as nothing.
    """
    blocks = strides(indices.size)
    partials = Partials(blocks, 1)
    launch(
        "merge", "norm_change", array.dtype, blocks,
        array, array.size, indices, indices.size, sent, partials.memory,
    )  # fmt: skip
    return partials.total(0)


def _check_room(name: str, needed: int, indices: Any, values: Any) -> None:
    if min(indices.size, values.size) < needed:
        raise ValueError(f"{name}: room for {needed} elements is needed, got {min(indices.size, values.size)}")


def _merge(
    operation: Operation, first: tuple[Any, Any, int], second: tuple[Any, Any, int], room: int, out_indices: Any,
    out_values: Any,
) -> Any:  # fmt: skip
    """Launch what counts the elements of the result, and what writes them; return their number."""
    parts = -(-(first[2] + second[2]) // PART)
    blocks = -(-parts // WARPS)
    of_parts, before = counters_of_tiles(parts)
    state = library().zeros(len(Field), np.uint64)
    launch(
        "merge", "count_parts", out_values.dtype, blocks,
        int(operation), *first, *second, parts, room, of_parts, before, state,
    )  # fmt: skip
    launch(
        "merge", "write_parts", out_values.dtype, blocks,
        int(operation), *first, *second, parts, room, of_parts, before, out_indices, out_values,
    )  # fmt: skip
    return state.view(np.int64)[Field.END]


def _count(values: Any, threshold: Any, rule: Rule, room: int) -> tuple[int, Any, Any, Any]:
    """Count the values above a threshold and equal to it; return the number of tiles, their counts and the state."""
    number = tiles(values.size, values.dtype)
    of_tiles, before = counters_of_tiles(number)
    state = library().zeros(len(Field), np.uint64)
    count_tiles(
        values, values.size, 0, 0, 0, 0, Source.ARRAY, (0, 0), given(threshold, np.uint64), rule, (0, room), (0, 0),
        number, of_tiles, before, state,
    )  # fmt: skip
    return number, of_tiles, before, state
