"""FetchSGD: sketches are summed and remembered, and the largest elements of that memory are delivered."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.algorithms.sketch import Sketch, SketchScheme, largest_estimates
from mpicomp.collectives.scheme import Exchange, LazyMean, Result, undelivered
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import current_device, to_python
from mpicomp.registry import register
from mpicomp.rounds import Group, Round


@register
@dataclass(frozen=True, repr=False)
class FetchSGD(Sketch):
    """FetchSGD (arXiv 2007.07682): momentum and error feedback in tables that are the same on all ranks.

    ::

        S = mean(sketch(x) for x in ranks)
        V = momentum * V + S; E = E + V  # the server's step, on every rank
        i = np.argsort(-abs(estimate(E)))[:k]; V, E = clear_cells(V, i), clear_cells(E, i)

    The k largest estimates from E are delivered. Ranks keep nothing but V and E.

    Parameters
    ----------
    ratio : float
        Delivered fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    rows, columns
        See `Sketch`. Columns should be several times the delivered elements: else most cells are cleared in each step.
    momentum : float
        If not 0 the optimizer must not apply momentum.
    wire : {None, "fp16", "bf16"}
        Format of numbers; the 16-bit forms are summed in at least float32, and their rounding errors are lost.

    Notes
    -----
    It runs without error feedback, and is refused with it: elements that were not delivered wait in the table, and a
    residual would add them once more.

    Estimates are delivered, and clearing their cells also clears whatever else is in these cells, and the errors of the
    estimates. So the sum of all gradients is not kept, other than with `CountSketch`. Subtracting the sketch of the
    delivered elements would keep it, and diverges, as published code has found.

    Different from the paper and its published code:

    - The learning rate is outside: elements that wait are applied at the rate of the step that delivers them.
    - Momentum is off unless asked for.
    - ``gain`` is NaN: a step does not deliver that step's gradients.

    A bucket of other length than before begins with empty tables, and one that is not finite leaves them as they were.

    Examples
    --------
    >>> compressor = FetchSGD(ratio=0.01)
    >>> compressor.table(100_000), compressor.count(100_000)
    ((5, 5000), 1000)
    """

    id: ClassVar[str] = "fetchsgd"
    remembered: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Rothchild et al. 2020, arXiv 2007.07682; the server's step on every rank, learning rate outside, momentum off "
        "by default"
    )

    rows: int = 5
    columns: float = 0.05

    feedback = False  # the error table keeps what is not delivered yet
    contractive = False  # a residual would keep a second time what the error table holds

    @property
    def can_fall_back_to_dense(self) -> bool:
        return not self.momentum  # which a dense step would not have

    def wire_bytes_per_element(self, itemsize: int) -> float:
        numel = 1 << 20
        rows, columns = self.table(numel)
        return rows * columns / numel * (itemsize if self.wire is None else 2)

    def count(self, numel: int) -> int:
        """Return the number of elements delivered out of ``numel``."""
        return num_kept(self.ratio, numel)


_KINDS = "velocity", "error"


@register
class SketchedMemory(SketchScheme[FetchSGD]):
    """The ranks' tables are summed, and each rank makes the same step of momentum and error feedback with the sum.

    No broadcast is needed: the mean table has the same bits on all ranks, and the step is made of sums and products
    that are rounded one by one. Tables are in the bucket's memory, and so in checkpoints; their hashes never change.
    """

    id: ClassVar[str] = "sketched-memory"
    paper: ClassVar[str] = (
        "the server's step of FetchSGD, Rothchild et al. 2020, arXiv 2007.07682, on every rank; tables are summed by "
        "any dense sum"
    )
    remembered: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        rows, columns = self.compressor.table(numel)
        return self._sum.rounds(rows * columns, dtype, group, step)

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        # 1. Sketch the gradient, and sum the tables of all ranks.
        numel, workspace = accumulated.numel, context.workspace
        shape = self.compressor.table(numel)
        before = self._remembered(numel, context)
        key = before["key"]
        first = yield from self.sum_of_tables(accumulated.array(), key, accumulated, context)
        if first.problem is not None:
            return undelivered(accumulated, first.problem, first.stale)
        # 2. Momentum and error feedback in the sketch: velocity = momentum velocity + mean, error = error + velocity.
        # Tables in the memory are read-only, so that a step can be undone by dropping its results.
        turn = 1 - before["turn"]
        velocity, error = (
            workspace.array(f"{kind} {turn}", shape[0] * shape[1], accumulated.dtype).reshape(shape) for kind in _KINDS
        )
        velocity_before, error_before = (current_device().to_device(before[kind]) for kind in _KINDS)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(velocity_before, accumulated.dtype.type(self.compressor.momentum), out=velocity)
            np.add(velocity, first.mean_in(workspace).reshape(shape), out=velocity)
        flat = error_before.reshape(-1).astype(velocity.dtype, copy=False)
        moments = kernels.accumulate(velocity.reshape(-1), flat, error.reshape(-1), accumulated.threads)
        # 3. Deliver the k largest estimates of the error.
        indices, values = largest_estimates(error, key, numel, self.compressor.count(numel), workspace)
        [finite] = to_python(moments.finite)
        nonfinite = first.nonfinite or not finite  # estimates are medians: few cells do not show in them
        # 4. Clear what was delivered in both tables, and keep them for the next step.
        if not nonfinite and not first.stale:
            for table in (velocity, error):
                kernels.sketch_clear(indices, key, table)
            context.memory.update(numel=numel, key=key, turn=turn, velocity=velocity, error=error)
        return Result(
            mean=LazyMean.of(numel, indices, values),
            sent=Selection(indices, values),
            energy=first.energy,
            gain=math.nan,
            kept=float(indices.size),
            nonfinite=nonfinite,
            stale=first.stale,
        )

    def _remembered(self, numel: int, context: Context) -> dict[str, Any]:
        """Return the memory of a bucket of this length, or that of a first step."""
        shape = self.compressor.table(numel)
        if context.memory.get("numel") == numel and context.memory["error"].shape == shape:
            return context.memory
        empty = current_device().zeros(shape[0] * shape[1], np.float32).reshape(shape)
        key = Context(seed=context.seed, bucket=context.bucket).key(shared=True)
        return {"key": key, "turn": 0, "velocity": empty, "error": empty}
