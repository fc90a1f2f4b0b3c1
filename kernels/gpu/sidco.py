"""Error feedback and SIDCo's estimated threshold (arXiv 2101.10761), from gradient to message on the device."""

from typing import Any, NamedTuple

import numpy as np
from mpicomp.kernels.gpu.accumulate import sweep
from mpicomp.kernels.gpu.compile import launch
from mpicomp.kernels.gpu.select import Field, Rule, Source, count_tiles, write_tiles
from mpicomp.kernels.gpu.workspace import MARGIN, Workspace

DISTRIBUTIONS = ("exponential", "gamma", "pareto")


class Estimate(NamedTuple):
    """What `sidco` tells, as 0-d device arrays in its workspace."""

    threshold: Any
    """The last one that was estimated: a number of the array's dtype, held in float64."""
    found: Any
    """How many elements exceed it, also where there was room for fewer."""
    stages: Any
    """How many stages were fitted; 0 where nothing could be, and the threshold is 0."""
    nonzero: Any
    """Elements of the accumulated gradient that are not zero."""
    total: Any
    """Sum of its magnitudes."""
    energy: Any
    """Sum of its squares."""
    logarithm: Any
    """Sum of the logarithms of its magnitudes that are not zero; NaN where the distribution has no need of it."""
    top: Any
    """Its largest magnitude bits, as uint64."""
    candidates: Any
    """Elements that reached the bound; 0 without a bound."""
    hit: Any
    """1 where the candidates were enough, 0 where the whole array was searched."""


def sidco(
    gradient: Any,
    residual: Any,
    out: Any,
    ratio: float,
    distribution: str,
    stages: int,
    state: Any,
    indices: Any,
    values: Any,
    count: Any,
    workspace: Workspace,
    counted: bool = False,
) -> Estimate:
    """Select what exceeds an estimated threshold, and leave the rest as the new residual.

    A magnitude distribution is fitted to the elements that are not zero, and generalised Pareto or exponential tails
    to what exceeds the threshold of the stage before. ``2 * stages + 2`` launches; those that turn out not to be
    needed end at once. Every stage after the first sweeps over ``out``, which it reads.

    Parameters
    ----------
    gradient, residual, out
        As in `mpicomp.kernels.gpu.accumulate`; the selected elements of ``out`` are then set to zero.
    ratio : float
        Of all elements, zeros included, the part that is wanted.
    distribution : {"exponential", "gamma", "pareto"}
        Of the first stage; later ones are exponential after exponential, else generalised Pareto.
    stages : int
        At least 1. One is enough, and only one is fitted, where more than a quarter of the nonzero elements is wanted.
    state : device array of uint64, shape (1,)
        Magnitude bits from which on an element is a candidate, 0 for none; receives the bound for the next step, as
        in `topk`.
    indices, values : device arrays, shape (room,)
        Of uint32, and of the dtype of ``out``; receive the selection, ascending by index. Where more exceed the
        threshold than there is room for, the first ones are taken.
    count : device array of int64, shape (1,)
        Receives how many were taken.
    workspace : Workspace
        Made for as many elements.
    counted : bool
        Whether later stages aim at the wanted elements over those that they really have, as the compressor of that name
        does, and not at fixed shares, as the paper does: a stage's error is then not handed on.

    Returns
    -------
    Estimate
        Valid until the next call with this workspace.
    """
    workspace.check(gradient, out)
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"sidco: distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    if stages < 1:
        raise ValueError(f"sidco: stages must be at least 1, got {stages}")
    w, number, dtype, kind = workspace, workspace.tiles, workspace.dtype, DISTRIBUTIONS.index(distribution)
    wanted = float(ratio) * w.numel
    sweep(
        gradient, residual, out, distribution == "gamma", (state, 0),
        w.index, w.bits, w.room, w.starts, w.counts, w.state, w.sums, w.tops,
    )  # fmt: skip
    launch(
        "sidco", "first_threshold", dtype, 1,
        w.sums, w.tops, w.blocks, wanted, kind, stages, w.fit,
    )  # fmt: skip
    for left in range(stages - 1, 0, -1):
        launch("tail", "tail", dtype, w.blocks, out, out.size, out.size, 1, w.fit, 0.0, w.bits_of_fit[2:], w.sums)
        launch("sidco", "next_threshold", dtype, 1, w.sums, w.blocks, wanted, left if counted else 0, kind, w.fit)
    count_tiles(
        out, out.size, w.bits, w.room, w.starts, w.counts, Source.LIST_IF_COMPLETE, (state, 0),
        (w.bits_of_fit[1:], 0), Rule.ABOVE, indices.size, (0, 0), number, w.of_tiles, w.before, w.state,
    )  # fmt: skip
    write_tiles(
        out, out.size, w.index, w.bits, w.starts, w.counts, number, w.of_tiles, w.before, w.state, 0, indices,
        values=values, clear=True, bound=state, listable=w.room, margin=MARGIN, count=count,
    )  # fmt: skip
    return Estimate(
        w.fit[0],
        w.numbers[Field.END],
        w.integers_of_fit[9],
        w.integers_of_fit[4],
        w.fit[5],
        w.fit[6],
        w.fit[7],
        w.bits_of_fit[8],
        w.numbers[Field.LISTED],
        w.numbers[Field.USABLE],
    )


def gamma_threshold(shapes: Any, above: Any, out: Any) -> None:
    """Write where gamma distributions of scale 1 have a part ``above`` above it; arrays of float64, shape (n,)."""
    launch("sidco", "gamma_thresholds", np.float64, -(-out.size // 256), shapes, above, out.size, out)
