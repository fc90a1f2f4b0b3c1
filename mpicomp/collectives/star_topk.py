"""STAR-Topk: one rank's indices for all, the ranks taking turns."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.round import Group, Round
from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme, gain_of
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Selection, Sparsifier
from mpicomp.errors import MessageError
from mpicomp.kernels import cpu

_INDEX = np.dtype(np.uint32)
_EXTRA = 4  # summed behind the values: non-finite, stale, energy, kept energy


class StarTopk(Scheme[Sparsifier]):
    """Bcast of the selecting rank's indices, then a sum of every rank's values at them.

    The selecting rank is ``step mod ranks``; the others select nothing. Values need no indices, so their sum
    costs what a dense one of k elements does, whatever the number of ranks.
    """

    id: ClassVar[str] = "star-topk"
    paper: ClassVar[str] = (
        "AR-Topk with round-robin selection, Tyagi and Swany 2023, arXiv 2312.02493; indices of 32 bits, residuals "
        "start at zero, gain from all ranks' norms"
    )
    messages: ClassVar[str] = "sparse"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Give a bcast of indices and an allreduce of values; see `Scheme.rounds`."""
        root = step % group.size
        count = self.compressor.count(numel)
        asked = []
        if count is None:
            asked = [Round("bcast", (1,), np.dtype(np.int64), root=root)]
            count = round(numel * self.compressor.wire_bytes_per_element(dtype.itemsize) / (4 + dtype.itemsize))
        return [*asked, Round("bcast", (count,), _INDEX, root=root), self._sum(count, dtype, group)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Select on one rank, sum on all; see `Scheme.exchange`."""
        group, workspace, dtype = context.group, context.workspace, accumulated.dtype
        *ask, share, _ = self.rounds(accumulated.numel, dtype, group, context.step)
        chosen: Selection | None = None
        if group.rank == share.root:
            chosen = self.compressor.select(accumulated, context.memory, workspace)
        array = accumulated.array()
        if ask:
            if chosen is not None:
                ask[0].send = np.array([chosen.indices.size], np.int64)
            ask[0].recv = workspace.array("count", 1, np.int64)
            share.counts = (int((yield ask[0])[0]),)
        count = share.counts[0]
        if chosen is not None:
            share.send = chosen.indices
        share.recv = workspace.array("indices", count, _INDEX)
        indices = yield share

        outgoing = workspace.array("outgoing", count + _EXTRA, dtype)
        values = outgoing[:count]
        if not cpu.gather(array, indices, values):
            raise MessageError(f"star-topk: an index from rank {share.root} is not below {accumulated.numel}")
        kept = cpu.energy(values)
        with np.errstate(over="ignore"):
            outgoing[count:] = (not accumulated.finite, accumulated.stale, accumulated.energy, kept)
        add = self._sum(count, dtype, group)
        add.send = outgoing
        add.recv = workspace.array("incoming", sum(add.counts), dtype)
        received = yield add
        if add.operation == "allreduce":
            total = received
        else:
            total = workspace.array("total", count + _EXTRA, dtype)
            total[:] = 0
            for part in received.reshape(group.size, -1):
                total += part

        nonfinite, stale, energy, all_kept = (float(value) for value in total[count:])
        top = cpu.scale(total[:count], 1 / group.size)
        mean = workspace.array("mean", accumulated.numel, dtype)
        mean[:] = 0
        cpu.scatter_add(indices, total[:count], 1, mean)
        return Result(
            mean=mean,
            sent=Selection(indices, values),
            gain=gain_of(energy - all_kept, energy),
            kept=float(count),
            nonfinite=nonfinite > 0 or not cpu.is_finite(top, dtype),
            stale=stale > 0,
        )

    def _sum(self, count: int, dtype: np.dtype[Any], group: Group) -> Round:
        if group.identical_sums:
            return Round("allreduce", (count + _EXTRA,), dtype)
        return Round("allgatherv", [count + _EXTRA] * group.size, dtype)
