"""Error feedback: gradient plus residual, in one sweep that also collects moments and candidates."""

from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.bits import scalar_arg, word_of
from mpicomp.kernels.gpu.compile import launch, library, sweeps, tiles, twin_of
from mpicomp.kernels.gpu.reduce import Partials
from mpicomp.kernels.gpu.select import Field, Rule, Source, count_tiles, counters_of_tiles, write_tiles

COLUMNS = 3  # sums of a sweep, the first of them an integer


@twin_of(cpu.accumulate)
def accumulate(gradient, residual, out, threads=1):
    partials = Partials(sweeps(out.size, out.dtype), COLUMNS, top=True)
    sweep(gradient, residual, out, (0, 0), 0, 0, 0, 0, 0, 0, partials)
    return _moments(partials)


# The sweep leaves candidates tile by tile, in the order in which tiles end; two short launches sort them.
@twin_of(cpu.accumulate_candidates)
def accumulate_candidates(gradient, residual, out, bound, base, index, bits, count, threads=1):
    cupy = library()
    number, room = tiles(out.size, out.dtype), index.size
    listed = cupy.empty(room, np.uint32), cupy.empty(room, word_of(out.dtype))
    starts, counts = cupy.empty(number, np.uint64), cupy.empty(number, np.uint32)
    of_tiles, before = counters_of_tiles(number)
    state = cupy.zeros(len(Field), np.uint64)
    partials = Partials(sweeps(out.size, out.dtype), COLUMNS, top=True)
    least = scalar_arg(bound, np.uint64)
    sweep(gradient, residual, out, least, *listed, room, starts, counts, state, partials)
    count_tiles(
        out, out.size, listed[1], room, starts, counts, Source.LIST_IF_COMPLETE, least, least, Rule.REACH, (0, room),
        scalar_arg(count, np.int64), number, of_tiles, before, state,
    )  # fmt: skip
    write_tiles(out, out.size, *listed, starts, counts, number, of_tiles, before, state, base, index, magnitudes=bits)
    return state.view(np.int64)[Field.END], _moments(partials)


def sweep(
    gradient: Any, residual: Any, out: Any, bound: tuple[Any, int], index: Any, bits: Any, room: int,
    starts: Any, counts: Any, state: Any, partials: Partials,
) -> None:  # fmt: skip
    """Launch the kernel that computes the sum; a bound of 0 lists no candidates."""
    launch(
        "accumulate", "accumulate", out.dtype, sweeps(out.size, out.dtype),
        gradient, 0 if residual is None else residual, out, out.size, *bound,
        index, bits, room, starts, counts, state, partials.memory,
    )  # fmt: skip


def _moments(partials: Partials) -> Any:
    return cpu.Moments(partials.count(), partials.total(1), partials.total(2), partials.finite())
