"""Error feedback and exact top-k, from gradient to message on the device."""

from typing import Any, NamedTuple

from mpicomp.kernels.gpu.select import Output, Rule, Source, Target, count_tiles, radix, write_tiles
from mpicomp.kernels.gpu.sweeps import accumulate_sweep
from mpicomp.kernels.gpu.workspace import Workspace


class Stats(NamedTuple):
    """Results of `topk` besides the selection, as 0-d device arrays in its workspace.

    Of the accumulated gradient: the number of elements that are not zero, the sums of magnitudes and of squares, and
    whether all are finite. ``threshold`` has the magnitude bits of the smallest selected element, as uint64.
    ``candidates`` is the number of elements that reached the bound; ``hit`` is 1 where these were enough.
    """

    nonzero: Any
    total: Any
    energy: Any
    finite: Any
    threshold: Any
    candidates: Any
    hit: Any


def topk(
    gradient: Any, residual: Any, out: Any, bound: Any, output: Output, workspace: Workspace, following: Any
) -> Stats:
    """Write gradient plus residual to ``out`` and select its k largest elements.

    A memset and six launches for float32, nine for float64, whatever the data; the host reads nothing and never waits.
    With a good bound one sweep goes through memory, with none or a bad one six (nine).

    ``bound``, one uint64, has the magnitude bits from which on an element is a candidate, 0 for none. ``following``,
    which may be ``bound``, receives the bound for the next step: 0.8 times the threshold at first, and then such a part
    of it that between k and 2 k elements reach it. ``output`` receives the k elements, ascending by index, and may be a
    whole message; equal magnitudes go to the lowest index, and NaN is larger than infinity. Results are valid until the
    next call with this workspace.
    """
    workspace.begin(gradient, out)
    w, k = workspace, (0, output.indices.size)
    if not 1 <= k[1] <= w.numel:
        raise ValueError(f"topk: k must be from 1 to {w.numel}, got {k[1]}")
    accumulate_sweep(gradient, residual, out, w.moments, w.listing, (bound, 0), w.tiled.state)
    radix(out, w.listing.bits, w.room, bound, k, w.counters, w.tiled.state)
    count_tiles(out, w.tiled, w.listing, Source.LIST_IF_USABLE, Target((w.threshold, 0), Rule.FILL, k))
    write_tiles(out, w.tiled, w.listing, output, bound=(bound, following), sums=w.sums)
    return Stats(*w.found, w.threshold[0], w.listed, w.usable)
