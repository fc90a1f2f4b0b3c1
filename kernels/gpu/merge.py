"""Sorted selections: sum, difference, intersection, and their largest elements."""

from enum import IntEnum
from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.compile import WARPS, launch, library, scalar_arg, strides, twin_of
from mpicomp.kernels.gpu.select import (
    Field,
    Listing,
    Rule,
    Source,
    Target,
    Tiles,
    count_tiles,
    counters_of_tiles,
    tiles_of,
)
from mpicomp.kernels.gpu.workspace import Partials, reuse

PART = 256  # places of two merged lists that a warp handles


class Operation(IntEnum):
    """Result of a merge of two selections."""

    ADD, SUBTRACT, COMMON = range(3)


@twin_of(cpu.merge_add)
def merge_add(indices_a, values_a, indices_b, values_b, out_indices, out_values):
    room, first, second = indices_a.size + indices_b.size, (indices_a, values_a), (indices_b, values_b)
    return _merge("merge_add", Operation.ADD, first, second, room, out_indices, out_values)


@twin_of(cpu.merge_subtract)
def merge_subtract(indices_a, values_a, indices_b, values_b, out_indices, out_values):
    room, first, second = indices_a.size + indices_b.size, (indices_a, values_a), (indices_b, values_b)
    return _merge("merge_subtract", Operation.SUBTRACT, first, second, room, out_indices, out_values)


@twin_of(cpu.intersect)
def intersect(indices_a, values_a, indices_b, out_indices, out_values):
    room = min(indices_a.size, indices_b.size)
    return _merge("intersect", Operation.COMMON, (indices_a, values_a), (indices_b, 0), room, out_indices, out_values)


@twin_of(cpu.count_reaching)
def count_reaching(values, threshold):
    return _count(values, threshold, Rule.REACH, 0).state.view(np.int64)[Field.END]


# The number of elements that reach the threshold is known on the device only: where it does not fit, nothing is raised,
# and the outputs are undefined.
@twin_of(cpu.split_largest)
def split_largest(indices, values, threshold, kept_indices, kept_values, left_indices, left_values):
    kept = kept_indices.size
    if left_indices.size != values.size - kept:
        raise ValueError(f"split_largest: {values.size} elements, not {kept} and {left_indices.size}")
    tiled = _count(values, threshold, Rule.FILL, kept)
    launch(
        "merge", "split_tiles", values.dtype, -(-tiled.number // WARPS),
        indices, values, *tiled,
        kept_indices, kept_values, kept, left_indices, left_values, left_indices.size,
    )  # fmt: skip


# Elements whose index is out of range count as zero.
@twin_of(cpu.norm_change)
def norm_change(array, indices, sent):
    blocks = strides(indices.size)
    partials = reuse(Partials, blocks, 1)
    launch(
        "merge", "norm_change", array.dtype, blocks,
        array, array.size, indices, indices.size, sent, partials.memory,
    )  # fmt: skip
    return partials.total(0)


def _merge(
    name: str, operation: Operation, first: tuple[Any, Any], second: tuple[Any, Any], room: int, out_indices: Any,
    out_values: Any,
) -> Any:  # fmt: skip
    if min(out_indices.size, out_values.size) < room:
        there = min(out_indices.size, out_values.size)
        raise ValueError(f"{name}: room for {room} elements is needed, got {there}")
    lists = *first, first[0].size, *second, second[0].size
    parts = -(-(first[0].size + second[0].size) // PART)
    blocks = -(-parts // WARPS)
    of_parts, before = counters_of_tiles(parts)
    state = library().zeros(len(Field), np.uint64)
    launch(
        "merge", "count_parts", out_values.dtype, blocks,
        int(operation), *lists, parts, room, of_parts, before, state,
    )  # fmt: skip
    launch(
        "merge", "write_parts", out_values.dtype, blocks,
        int(operation), *lists, parts, room, of_parts, before, out_indices, out_values,
    )  # fmt: skip
    return state.view(np.int64)[Field.END]


def _count(values: Any, threshold: Any, rule: Rule, room: int) -> Tiles:
    tiled = tiles_of(values.size, values.dtype)
    count_tiles(values, tiled, Listing(), Source.ARRAY, Target(scalar_arg(threshold, np.uint64), rule, (0, room)))
    return tiled
