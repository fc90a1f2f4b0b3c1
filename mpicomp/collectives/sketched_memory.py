"""A sum of tables, which all ranks add to tables that they remember."""

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme, undelivered
from mpicomp.collectives.sketched import largest_estimates, sum_of_tables
from mpicomp.collectives.sparse_mean import SparseMean
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Compressor, Scope, Selection
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.fetchsgd import FetchSGD
from mpicomp.kernels import cpu
from mpicomp.rounds import Group, Round

_KINDS = "velocity", "error"


class SketchedMemory(Scheme[FetchSGD]):
    """The ranks' tables are summed, and each rank makes the same step of momentum and error feedback with the sum.

    Nothing is broadcast: the mean table has the same bits on all ranks, and the step is made of sums and products that
    are rounded one by one. The tables are in the bucket's memory, and so in checkpoints. Their hashes stay the same.

    Parameters
    ----------
    compressor : FetchSGD
        Says how large tables are, and how much is delivered.
    inner : Scheme
        Sums tables.
    """

    id: ClassVar[str] = "sketched-memory"
    paper: ClassVar[str] = (
        "the server's step of FetchSGD, Rothchild et al. 2020, arXiv 2007.07682, on every rank; tables are summed by "
        "any dense sum"
    )
    messages: ClassVar[str] = "sketch"

    def __init__(self, compressor: FetchSGD, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner

    @classmethod
    def carries(cls, compressor: type[Compressor] | Compressor) -> bool:
        """Carry sketches that are remembered; see `Scheme.carries`."""
        return super().carries(compressor) and bool(getattr(compressor, "remembered", False))

    @classmethod
    def upon(cls, compressor: Compressor) -> Compressor:
        """Tables are summed by a dense collective."""
        return Dense(wire=getattr(compressor, "wire", None))

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Give one sum; see `Scheme.rounds`."""
        rows, columns = self.compressor.table(numel)
        return self._sum.rounds(rows * columns, dtype, group, step)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Sketch, sum, remember, deliver the largest; see `Scheme.exchange`."""
        numel, workspace = accumulated.numel, context.workspace
        shape = self.compressor.table(numel)
        before = self._remembered(numel, context)
        key = before["key"]
        first = yield from sum_of_tables(self.compressor, accumulated.array(), key, accumulated, context, self._sum)

        if first.problem is not None:
            return undelivered(accumulated, first.problem, first.stale)
        # What is remembered is not written to, so that a step can be undone by forgetting what it gives.
        turn = 1 - before["turn"]
        velocity, error = (
            workspace.array(f"{kind} {turn}", shape[0] * shape[1], accumulated.dtype).reshape(shape) for kind in _KINDS
        )
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(before["velocity"], accumulated.dtype.type(self.compressor.momentum), out=velocity)
            np.add(velocity, first.mean.reshape(shape), out=velocity)
        flat = before["error"].reshape(-1).astype(velocity.dtype, copy=False)
        moments = cpu.accumulate(velocity.reshape(-1), flat, error.reshape(-1), accumulated.threads)
        indices, values = largest_estimates(error, key, numel, self.compressor.count(numel), workspace)
        mean = SparseMean.cleared(workspace, numel, accumulated.dtype)
        mean.add(indices, values, 1.0)
        nonfinite = first.nonfinite or not moments.finite  # estimates are medians: few cells do not show in them
        if not nonfinite and not first.stale:
            for table in (velocity, error):
                cpu.sketch_clear(indices, key, table)
            context.memory.update(numel=numel, key=key, turn=turn, velocity=velocity, error=error)
        return Result(
            mean=mean.array,
            sent=Selection(indices, values),
            energy=first.energy,
            gain=math.nan,
            kept=float(indices.size),
            nonfinite=nonfinite,
            stale=first.stale,
        )

    def _remembered(self, numel: int, context: Context) -> dict[str, Any]:
        """Give the memory, or that of a first step where there is none of a bucket of this length."""
        shape = self.compressor.table(numel)
        if context.memory.get("numel") == numel and context.memory["error"].shape == shape:
            return context.memory
        empty: NDArray[np.floating] = np.zeros(shape, np.float32)
        key = Scope(seed=context.seed, bucket=context.bucket).key(shared=True)
        return {"key": key, "turn": 0, "velocity": empty, "error": empty}
