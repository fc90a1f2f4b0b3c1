"""A collective as a generator of rounds: STAR-Topk without what the real one checks and reports."""

from typing import Any, ClassVar

import numpy as np

import mpicomp
from mpicomp.collectives import Context, Exchange, Result, Scheme
from mpicomp.compressors import Accumulated
from mpicomp.rounds import Group, Round


class BorrowedIndices(Scheme[mpicomp.Sparsifier]):
    """One rank selects for all; the ranks take turns."""

    id: ClassVar[str] = "borrowed-indices"
    paper: ClassVar[str] = "none: an example"
    messages: ClassVar[str] = "sparse"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Give the shapes of what `exchange` yields."""
        count = self.compressor.count(numel)
        assert count is not None, "this example needs a compressor that selects a fixed number"
        return [
            Round("bcast", (count,), np.dtype(np.uint32), root=step % group.size),
            Round("allreduce", (count + 4,), dtype),
        ]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Select on one rank, sum on all."""
        group, workspace = context.group, context.workspace
        share, add = self.rounds(accumulated.numel, accumulated.dtype, group, context.step)

        # Round 1: the indices of the rank whose turn it is.
        if group.rank == share.root:
            share.send = self.compressor.select(accumulated, context).indices
        share.recv = workspace.array("indices", share.counts[0], np.uint32)
        indices = yield share

        # Round 2: the sum of all ranks' values there. Four numbers travel behind them.
        values = accumulated.array()[indices]
        kept = float(values.astype(np.float64) @ values)
        about = np.array([not accumulated.finite, accumulated.stale, accumulated.energy, kept])
        add.send = np.concatenate([values, about]).astype(accumulated.dtype)
        add.recv = workspace.array("total", add.counts[0], accumulated.dtype)
        total = yield add

        nonfinite, stale, energy, all_kept = total[-4:]
        mean = workspace.array("mean", accumulated.numel, accumulated.dtype)
        mean[:] = 0
        mean[indices] = total[:-4] / group.size
        return Result(
            mean=mean,
            sent=mpicomp.Selection(indices, values),
            energy=float(energy),
            gain=float(all_kept / energy) if energy else 1.0,
            kept=float(indices.size),
            nonfinite=bool(nonfinite > 0),
            stale=bool(stale > 0),
        )
