"""Error feedback and SIDCo's estimated threshold (arXiv 2101.10761), from gradient to message on the device."""

from typing import Any, NamedTuple

from mpicomp.kernels.gpu.compile import launch, remaining, sweeps
from mpicomp.kernels.gpu.select import (
    BLOCKS,
    Condition,
    Field,
    Output,
    Rule,
    Source,
    Target,
    count_tiles,
    radix,
    write_tiles,
)
from mpicomp.kernels.gpu.sweeps import accumulate_sweep
from mpicomp.kernels.gpu.workspace import Fit, Workspace

DISTRIBUTIONS = ("exponential", "pareto")
CORRECTIONS = 6  # thresholds that may follow those of the stages
SMALL = 2048  # elements; fewer are selected exactly
SAMPLE = 1 << 21  # elements that are enough for a fit
LIMIT = 4  # times k; with SLACK the largest number of elements that are selected
SLACK = 1024  # elements that may be selected beyond ``LIMIT * k``


class Estimate(NamedTuple):
    """Results of `sidco` besides the selection, as 0-d device arrays in its workspace.

    The first four and the last two are those of `topk`. ``threshold`` is the last one that was estimated, in float64,
    or 0. ``reached`` is the share of the wanted elements that the stages without corrections have reached, or NaN.
    ``exact`` is 1 where exactly the k largest were selected.
    """

    nonzero: Any
    total: Any
    energy: Any
    finite: Any
    threshold: Any
    reached: Any
    exact: Any
    candidates: Any
    hit: Any


def sidco(
    gradient: Any,
    residual: Any,
    out: Any,
    k: int,
    distribution: str,
    stages: int,
    bound: Any,
    output: Output,
    workspace: Workspace,
    following: Any,
) -> Estimate:
    """Write gradient plus residual to ``out`` and select its elements above an estimated threshold.

    The rule is that of `mpicomp.SIDCo` with a fixed number of stages, at least 1; ``k`` elements are wanted.
    Distributions are "exponential" and "pareto". ``bound`` and ``following`` are those of `topk`; ``output`` receives
    the elements and their number, as int64, with room for ``4 k + 1024`` elements, or for all.

    There are ``stages + 13`` launches for float32 and three more for float64, of 2048 elements and more. The device
    decides which of them do anything; the others end at once. Usually one sweep goes through memory, and a few sample 2
    to 4 million elements. Without a good bound two sweeps follow; where an exact selection has to replace the estimate,
    four or seven more do. Results are valid until the next call with this workspace.
    """
    workspace.begin(gradient, out)
    w, dtype, state, room = workspace, workspace.dtype, workspace.tiled.state, output.indices.size
    most = LIMIT * k + SLACK
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"sidco: distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    if stages < 1:
        raise ValueError(f"sidco: stages must be at least 1, got {stages}")
    if not 1 <= k <= w.numel:
        raise ValueError(f"sidco: k must be from 1 to {w.numel}, got {k}")
    if room < min(w.numel, most):
        raise ValueError(f"sidco: there must be room for {min(w.numel, most)} elements, got {room}")
    kind, estimating = DISTRIBUTIONS.index(distribution), w.numel >= SMALL
    stride = max(1, w.numel // SAMPLE)
    sampled = remaining(w.numel, stride)
    blocks = min(BLOCKS, sweeps(sampled, dtype))
    accumulate_sweep(gradient, residual, out, w.moments, w.listing, (bound, 0), state)
    launch("sidco", "begin", dtype, 1, w.moments.memory, k, stages, kind, int(estimating), w.fit, state)
    wanted = k * sampled_of(w.numel, stride) / w.numel
    for _ in range(stages - 1 + CORRECTIONS if estimating else 0):
        launch(
            "sidco", "refine", dtype, blocks,
            out, out.size, sampled, stride, wanted, kind, w.sampled.memory, w.fit, state,
        )  # fmt: skip
    estimated = Target((w.estimated, 0), Rule.ABOVE, (0, most))
    count_tiles(
        out, w.tiled, w.listing, Source.LIST_IF_COMPLETE, estimated, (bound, 0), condition=Condition.UNLESS_EXACT
    )
    rank = w.rank, 0
    radix(out, w.listing.bits, w.room, bound, rank, w.counters, state, Condition.IF_EXACT)
    largest = Target((w.threshold, 0), Rule.FILL, rank)
    count_tiles(out, w.tiled, w.listing, Source.LIST_IF_USABLE, largest, condition=Condition.IF_EXACT)
    write_tiles(out, w.tiled, w.listing, output, bound=(bound, following), sums=w.sums)
    threshold, reached, exact = w.fit[Fit.THRESHOLD], w.fit[Fit.REACHED], state[Field.EXACT]
    return Estimate(*w.found, threshold, reached, exact, w.listed, w.usable)


def sampled_of(numel: int, stride: int) -> int:
    """Return the number of elements in every ``stride``-th group of 1024."""
    whole, rest = divmod(numel, 1024 * stride)
    return whole * 1024 + min(rest, 1024)
