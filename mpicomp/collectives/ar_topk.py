"""AR-Topk: one rank's indices for all, in turns or by energy."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import COUNT, Exchange, Memory, Scheme, check_counts, failed_result, mean_at
from mpicomp.compressors.accumulated import TRAILER, Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire import Selection
from mpicomp.errors import MessageError
from mpicomp.gpu import to_python
from mpicomp.kernels import sizes
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.registry import register

_HEADER = np.dtype([("energy", "<f8"), ("count", "<i8")])  # of VAR-Topk


class ARTopk(Scheme[Sparsifier]):
    """Bcast of one rank's indices, then a sum of every rank's values at them, by a dense collective."""

    messages: ClassVar[str] = "sparse"

    may_drop_selected = True

    def __init__(self, compressor: Sparsifier, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        assert isinstance(compressor, Sparsifier)
        return Dense(wire=compressor.wire)

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        count, needed = self.compressor.expected(numel), super().memory(numel, dtype, group)
        inner, values = self._sum.memory(count, dtype, group), count * dtype.itemsize
        return Memory(needed.scratch + inner.scratch, needed.held + inner.held + 2 * values)

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        leader, count = 0 if self.by_value else step % group.size, self.compressor.expected(numel)
        share = self._share(leader, count, numel)
        return [*self._election(leader, numel, group), share, *self._sum.rounds(count, dtype, group, step)]

    @abstractmethod
    def _election(self, leader: int, numel: int, group: Group) -> list[Round]:
        """Return the round, if any, before that of the indices."""

    @abstractmethod
    def _elect(self, accumulated: Accumulated, context: Context) -> Rounds[tuple[int, int, Selection | None]]:
        """Return the rank whose indices serve all, their number, and this rank's selection if it made one."""

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        workspace, numel = context.workspace, accumulated.numel
        leader, count, chosen = yield from self._elect(accumulated, context)
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
        return (yield from exchange_at(indices, accumulated, context, self._sum, problem))

    def _share(self, leader: int, count: int, numel: int) -> Round:
        if self.compressor.wire_for(count, numel).indices == "plain":
            return Round("bcast", (count,), np.dtype(np.uint32), root=leader)
        return Round("bcast", (sizes.index_bytes(count, numel),), np.dtype(np.uint8), root=leader)


@register
class StarTopk(ARTopk):
    """AR-Topk in turns: rank ``step mod ranks`` selects, the others select nothing."""

    id: ClassVar[str] = "star-topk"
    precedence: ClassVar[int] = 4
    paper: ClassVar[str] = (
        "AR-Topk with round-robin selection, Tyagi and Swany 2023, arXiv 2312.02493; indices coded or of 32 bits, "
        "residuals start at zero, gain from all ranks' norms"
    )

    def _election(self, leader: int, numel: int, group: Group) -> list[Round]:
        known = self.compressor.count(numel) is not None
        return [] if known else [Round("bcast", (1,), COUNT, root=leader)]

    def _elect(self, accumulated: Accumulated, context: Context) -> Rounds[tuple[int, int, Selection | None]]:
        leader, numel = context.step % context.group.size, accumulated.numel
        leads = context.group.rank == leader
        chosen = self.compressor.select(accumulated, context) if leads else None
        count = self.compressor.count(numel)
        for ask in self._election(leader, numel, context.group):
            ask.recv = context.workspace.host_array("count", 1, COUNT)
            if chosen is not None:
                ask.send = np.array([chosen.indices.size], COUNT)
            sent = None if chosen is None else (0, chosen.indices.size)
            [count] = check_counts(self.id, (yield ask), 0, numel, sent)
        assert count is not None
        return leader, count, chosen


@register
class VarTopk(ARTopk):
    """AR-Topk by energy: every rank selects, and the indices of the selection with the largest energy serve all.

    An allgatherv of 16 bytes a rank exchanges energies and counts first. Of equal energies the lowest rank's wins, and
    NaN counts as the smallest.
    """

    id: ClassVar[str] = "var-topk"
    precedence: ClassVar[int] = 5
    paper: ClassVar[str] = (
        "AR-Topk with variance-based selection, Tyagi and Swany 2023, arXiv 2312.02493; energies in float64, ties to "
        "the lowest rank, indices coded or of 32 bits, residuals start at zero, gain from all ranks' norms"
    )
    by_value = True

    def _election(self, leader: int, numel: int, group: Group) -> list[Round]:
        return [Round("allgatherv", [_HEADER.itemsize] * group.size, np.dtype(np.uint8))]

    def _elect(self, accumulated: Accumulated, context: Context) -> Rounds[tuple[int, int, Selection | None]]:
        group = context.group
        chosen = self.compressor.select(accumulated, context)
        [compare] = self._election(0, accumulated.numel, group)
        [energy] = to_python(kernels.energy(chosen.values))
        header = np.array([(energy, chosen.indices.size)], _HEADER)
        compare.send = header.view(np.uint8)
        compare.recv = context.workspace.host_array("headers", sum(compare.counts), np.uint8)
        headers = (yield compare).view(_HEADER)
        sent = group.rank, chosen.indices.size
        counts = check_counts(self.id, headers["count"], 0, accumulated.numel, sent)
        energies = headers["energy"]
        leader = int(np.argmax(np.where(np.isnan(energies), -1.0, energies)))
        return leader, counts[leader], chosen


def exchange_at(
    indices: NDArray[np.uint32],
    accumulated: Accumulated,
    context: Context,
    inner: Scheme[Any],
    problem: MessageError | None = None,
) -> Exchange:
    """Average the values at some positions, the same on all ranks, as if they were the whole array.

    If the positions are wrong (``problem``), this rank takes part with zeros and asks all ranks to agree again.
    """
    array, dtype = accumulated.array(), accumulated.dtype
    buffer = context.workspace.array("positions", indices.size + TRAILER, dtype)
    values = buffer[: indices.size]
    right, kept, lost = False, 0.0, 0.0
    if problem is None:
        gathered = kernels.gather(array, indices, values)
        right, kept = accumulated.to_host(gathered, kernels.energy(values))
        if not right:
            wrong = f"an index of the ranks' common positions is not below {accumulated.numel}"
            problem = MessageError(f"{inner.id}: {wrong}")
    if problem is not None:
        values[:] = 0
    else:
        lost = max(0.0, accumulated.energy - kept)
    stale = accumulated.stale or problem is not None
    part = Accumulated.ready(buffer, accumulated.energy, lost, accumulated.finite, stale)
    result = yield from inner.exchange(part, context)
    problem = problem or result.problem
    if problem is not None:
        return failed_result(accumulated, problem, result.stale)
    assert not isinstance(result.sent, Selection)
    values[:] = result.sent  # which may be scratch; often it is these values
    mean = mean_at(indices, result.mean_array(part, context.workspace, "mean of positions"))
    return replace(result, mean=mean, sent=Selection(indices, values), kept=float(indices.size))
