"""Exchange at positions that all ranks share: drawn alike on all ranks, or those that one rank has selected."""

from typing import Any, ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, Scheme
from mpicomp.collectives.selection import exchange_at
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import SharedSparsifier, Sparsifier
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import to_python
from mpicomp.errors import MessageError
from mpicomp.kernels import sizes
from mpicomp.rounds import Group, Round


class SharedPositions(Scheme[SharedSparsifier]):
    """No indices on the wire: the values at the common positions are exchanged as a short array."""

    paper: ClassVar[str] = "none: the collective's own, on a shorter array"
    messages: ClassVar[str] = "dense"

    def __init__(self, compressor: SharedSparsifier, inner: Scheme[Any]) -> None:
        super().__init__(compressor)
        self._inner = inner
        self.id = inner.id  # type: ignore[misc]  # one class for as many names as there are collectives

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        return self._inner.rounds(self.compressor.count(numel), dtype, group, step)

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        numel = accumulated.numel
        indices = context.workspace.array("indices", self.compressor.count(numel), np.uint32)
        self.compressor.positions(numel, context, indices)
        return (yield from exchange_at(indices, self.compressor.weights(numel), accumulated, context, self._inner))


class Leading(Scheme[Sparsifier]):
    """Bcast of one rank's indices, then a sum of every rank's values at them.

    Values need no indices, so their sum costs what a dense one of k elements does, whatever the number of ranks.
    16-bit values are summed as those of `mpicomp.Dense` are.
    """

    may_drop_selected = True

    def __init__(self, compressor: Sparsifier, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        """Values are summed by a dense collective."""
        assert isinstance(compressor, Sparsifier)
        return Dense(wire=compressor.wire)

    def _rounds_led(
        self, leader: int, count: int, numel: int, dtype: np.dtype[Any], group: Group, step: int
    ) -> list[Round]:
        """Return the shapes of the rounds of `_exchange_led`."""
        return [self._share(leader, count, numel), *self._sum.rounds(count, dtype, group, step)]

    def _exchange_led(
        self, leader: int, count: int, chosen: Selection | None, accumulated: GradientWithResidual, context: Context
    ) -> Exchange:
        """Average the values at the leader's indices."""
        workspace, numel = context.workspace, accumulated.numel
        share = self._share(leader, count, numel)
        coded = share.dtype == np.uint8
        if context.group.rank == leader:
            assert chosen is not None
            share.send = chosen.indices
            if coded:
                share.send = workspace.array("code", share.counts[0], np.uint8)
                kernels.encode_indices(chosen.indices, numel, share.send)
        share.recv = workspace.array("indices", share.counts[0], share.dtype)
        indices = yield share
        if coded:
            code = indices
            indices = workspace.array("indices", count, np.uint32)
            right = kernels.decode_indices(code, count, numel, indices)
        else:
            right = kernels.ascending_below(indices, numel)
        problem = None
        if not all(to_python(right)):
            problem = MessageError(f"{self.id}: from rank {leader}: indices do not ascend below {numel}")
        return (yield from exchange_at(indices, 1.0, accumulated, context, self._sum, problem))

    def _share(self, leader: int, count: int, numel: int) -> Round:
        if self.compressor.wire_for(count, numel).indices == "plain":
            return Round("bcast", (count,), np.dtype(np.uint32), root=leader)
        return Round("bcast", (sizes.index_bytes(count, numel),), np.dtype(np.uint8), root=leader)
