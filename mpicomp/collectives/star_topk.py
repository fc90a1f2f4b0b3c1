"""STAR-Topk: one rank's indices for all, the ranks taking turns."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.positions import exchange_at
from mpicomp.collectives.round import Group, Round
from mpicomp.collectives.scheme import Context, Exchange, Scheme
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Compressor, Selection, Sparsifier
from mpicomp.compressors.dense import Dense
from mpicomp.errors import MessageError
from mpicomp.kernels import cpu


class StarTopk(Scheme[Sparsifier]):
    """Bcast of the selecting rank's indices, then a sum of every rank's values at them.

    The selecting rank is ``step mod ranks``; the others select nothing. Values need no indices, so their sum
    costs what a dense one of k elements does, whatever the number of ranks. 16-bit values are summed as those of
    `mpicomp.Dense` are.
    """

    id: ClassVar[str] = "star-topk"
    paper: ClassVar[str] = (
        "AR-Topk with round-robin selection, Tyagi and Swany 2023, arXiv 2312.02493; indices coded or of 32 bits, "
        "residuals start at zero, gain from all ranks' norms"
    )
    messages: ClassVar[str] = "sparse"

    def __init__(self, compressor: Sparsifier, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner

    @classmethod
    def upon(cls, compressor: Compressor) -> Compressor:
        """Values are summed by a dense collective."""
        assert isinstance(compressor, Sparsifier)
        return Dense(wire=compressor.wire)

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Give a bcast of indices and a sum of values; see `Scheme.rounds`."""
        root = step % group.size
        count = self.compressor.count(numel)
        asked = []
        if count is None:
            asked = [Round("bcast", (1,), np.dtype(np.int64), root=root)]
            count = self.compressor.expected(numel)
        return [*asked, self._share(count, numel, root), *self._sum.rounds(count, dtype, group, step)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Select on one rank, sum on all; see `Scheme.exchange`."""
        group, workspace, numel = context.group, context.workspace, accumulated.numel
        root = context.step % group.size
        chosen: Selection | None = None
        if group.rank == root:
            chosen = self.compressor.select(accumulated, context)
        count = self.compressor.count(numel)
        if count is None:
            ask = Round("bcast", (1,), np.dtype(np.int64), root=root, recv=workspace.array("count", 1, np.int64))
            if chosen is not None:
                ask.send = np.array([chosen.indices.size], np.int64)
            count = int((yield ask)[0])

        share = self._share(count, numel, root)
        coded = share.dtype == np.uint8
        if chosen is not None:
            share.send = chosen.indices
            if coded:
                share.send = workspace.array("code", share.counts[0], np.uint8)
                cpu.encode_indices(chosen.indices, numel, share.send)
        share.recv = workspace.array("indices", share.counts[0], share.dtype)
        indices = yield share
        if coded:
            code = indices
            indices = workspace.array("indices", count, np.uint32)
            if not cpu.decode_indices(code, count, numel, indices):
                raise MessageError(f"star-topk: the indices from rank {root} are damaged")
        return (yield from exchange_at(indices, 1.0, accumulated, context, self._sum))

    def _share(self, count: int, numel: int, root: int) -> Round:
        if self.compressor.wire_for(count, numel).indices == "plain":
            return Round("bcast", (count,), np.dtype(np.uint32), root=root)
        return Round("bcast", (cpu.index_bytes(count, numel),), np.dtype(np.uint8), root=root)
