"""Error feedback: gradient plus residual, in one sweep that also collects moments and candidates."""

from typing import Any

import numpy as np
from mpicomp.kernels.cpu.bits import infinity_of
from mpicomp.kernels.gpu.bits import given, word_of
from mpicomp.kernels.gpu.compile import launch, library, sweeps, tiles
from mpicomp.kernels.gpu.moments import Moments
from mpicomp.kernels.gpu.reduce import Partials
from mpicomp.kernels.gpu.select import Field, Rule, Source, count_tiles, counters_of_tiles, write_tiles

COLUMNS = 3  # of the sums that a sweep leaves; the first one is an integer


def is_finite(top: Any, dtype: Any) -> Any:
    """Return whether every element was finite, from a sweep's largest magnitude bits, as a 0-d array."""
    return top < infinity_of(np.dtype(dtype))


def accumulate(gradient: Any, residual: Any, out: Any, threads: int = 1) -> Moments:
    """Write ``gradient + residual`` to ``out``, in one sweep; see `mpicomp.kernels.cpu.accumulate`.

    Parameters
    ----------
    gradient : device array, shape (n,)
        float32 or float64, contiguous. It may be ``out`` itself, as ``residual`` may be.
    residual : device array, shape (n,), or None
        Of the same dtype. None stands for zeros: the gradient is copied.
    out : device array, shape (n,)
        Receives the sum; of the same dtype.
    threads : int
        Of no meaning here.

    Returns
    -------
    Moments
        Of ``out``.
    """
    partials = Partials(sweeps(out.size, out.dtype), COLUMNS, top=True)
    sweep(gradient, residual, out, (0, 0), 0, 0, 0, 0, 0, 0, partials)
    return _moments(partials)


def accumulate_candidates(
    gradient: Any,
    residual: Any,
    out: Any,
    bound: Any,
    base: int,
    index: Any,
    bits: Any,
    count: Any,
    threads: int = 1,
) -> tuple[Any, Moments]:
    """Do what `accumulate` does and list the elements of at least a given magnitude, ascending by index.

    See `mpicomp.kernels.cpu.accumulate_candidates`; ``bound`` and ``count`` may be 0-d device arrays. The sweep
    leaves candidates tile by tile, in whatever order the tiles end; two short launches put them in order.

    Returns
    -------
    count : 0-d device array of int64
        Candidates found so far. A count above ``index.size`` means that some were not stored.
    moments : Moments
        Of ``out``.
    """
    cupy = library()
    number, room = tiles(out.size, out.dtype), index.size
    listed = cupy.empty(room, np.uint32), cupy.empty(room, word_of(out.dtype))
    starts, counts = cupy.empty(number, np.uint64), cupy.empty(number, np.uint32)
    of_tiles, before = counters_of_tiles(number)
    state = cupy.zeros(len(Field), np.uint64)
    partials = Partials(sweeps(out.size, out.dtype), COLUMNS, top=True)
    least = given(bound, np.uint64)
    sweep(gradient, residual, out, least, *listed, room, starts, counts, state, partials)
    count_tiles(
        out, out.size, listed[1], room, starts, counts, Source.LIST_IF_COMPLETE, least, least, Rule.REACH, (0, room),
        given(count, np.int64), number, of_tiles, before, state,
    )  # fmt: skip
    write_tiles(out, out.size, *listed, starts, counts, number, of_tiles, before, state, base, index, magnitudes=bits)
    return state.view(np.int64)[Field.END], _moments(partials)


def sweep(
    gradient: Any, residual: Any, out: Any, bound: tuple[Any, int], index: Any, bits: Any, room: int,
    starts: Any, counts: Any, state: Any, partials: Partials,
) -> None:  # fmt: skip
    """Launch the kernel that makes the sum; a bound of 0 lists nothing."""
    launch(
        "accumulate", "accumulate", out.dtype, sweeps(out.size, out.dtype),
        gradient, 0 if residual is None else residual, out, out.size, *bound,
        index, bits, room, starts, counts, state, partials.memory,
    )  # fmt: skip


def _moments(partials: Partials) -> Moments:
    return Moments(partials.count(), partials.total(1), partials.total(2), partials.finite())
