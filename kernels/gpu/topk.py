"""Error feedback and exact top-k, from gradient to message on the device."""

from typing import Any, NamedTuple

from mpicomp.kernels.gpu.select import Output, Rule, Source, Target, count_tiles, radix, write_tiles
from mpicomp.kernels.gpu.sweeps import accumulate_sweep
from mpicomp.kernels.gpu.workspace import Workspace


class Stats(NamedTuple):
    """Results of `topk` besides the selection, as 0-d device arrays in its workspace."""

    nonzero: Any
    """Elements of the accumulated gradient that are not zero."""
    total: Any
    """Sum of its magnitudes."""
    energy: Any
    """Sum of its squares."""
    finite: Any
    """Whether all its elements are finite numbers."""
    threshold: Any
    """Magnitude bits of the smallest element that was selected, as uint64."""
    candidates: Any
    """Elements that reached the bound; 0 without a bound."""
    hit: Any
    """1 where the candidates were enough, 0 where the whole array was searched."""


def topk(
    gradient: Any,
    residual: Any,
    out: Any,
    bound: Any,
    indices: Any,
    values: Any,
    workspace: Workspace,
    following: Any,
) -> Stats:
    """Write gradient plus residual to ``out`` and select its k largest elements.

    A memset and six launches for float32, nine for float64, whatever the data; the host reads nothing and never waits.
    With a good bound one sweep goes through memory, with none or a bad one six (nine).

    ``bound``, one uint64, has the magnitude bits from which on an element is a candidate, 0 for none. ``following``,
    which may be ``bound``, receives the bound for the next step: 0.8 times the threshold at first, and then such a part
    of it that between k and 2 k elements reach it. ``indices`` and ``values`` receive the k elements, ascending by
    index; equal magnitudes go to the lowest index, and NaN is larger than infinity. Results are valid until the next
    call with this workspace.
    """
    workspace.begin(gradient, out)
    w = workspace
    if not 1 <= indices.size <= w.numel:
        raise ValueError(f"topk: k must be from 1 to {w.numel}, got {indices.size}")
    k = 0, indices.size
    accumulate_sweep(gradient, residual, out, w.moments, w.listing, (bound, 0), w.state)
    radix(out, w.listing.bits, w.room, bound, k, w.counters, w.state)
    count_tiles(out, w.tiled, w.listing, Source.LIST_IF_USABLE, Target((w.threshold, 0), Rule.FILL, k))
    write_tiles(out, w.tiled, w.listing, Output(indices, values), bound=bound, following=following)
    return Stats(w.nonzero, w.total, w.energy, w.finite, w.threshold[0], w.listed, w.usable)
