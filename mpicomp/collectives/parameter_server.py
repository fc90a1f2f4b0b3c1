"""One rank gathers everybody's messages, averages them and sends the mean to all."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.dense_message import add, dense_bytes, pack, unpack, write_header
from mpicomp.collectives.regions import read_answers, read_sent
from mpicomp.collectives.scheme import (
    Exchange,
    LazyMean,
    Result,
    Scheme,
    check_counts,
    count_round,
    gather_counts,
    is_finite,
    plus,
    undelivered,
)
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import (
    NONFINITE,
    STALE,
    Selection,
    Wire,
    compact,
    message_bytes,
    parse_message,
    write_message,
)
from mpicomp.device import to_python
from mpicomp.errors import MessageError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.workspace import Workspace

_COUNT = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)
_SERVER = 0


@register
class ParameterServer(Scheme[Compressor]):
    """Gatherv to rank 0, which decodes in rank order, and Bcast of the mean, which all ranks decode, rank 0 too.

    Two steps whatever the number of ranks, but all bytes pass through the link of one of them.

    Dense arrays come back as they were sent: with a 16-bit wire rank 0 takes the error of the second rounding, times
    the number of ranks, into its residual. For sparse messages the union comes back: its length comes first, by a
    bcast of one integer; values are not rounded a second time; where the whole array is shorter it comes in place of
    the union.
    """

    id: ClassVar[str] = "parameter-server"
    precedence: ClassVar[int] = 90
    paper: ClassVar[str] = "Li et al. 2014 (OSDI) in shape; one server, which is a worker too"
    messages: ClassVar[str] = "dense or sparse"
    needs_whole_message: ClassVar[bool] = True

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor)
        self.by_value = isinstance(compressor, Sparsifier)  # the union that comes back

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        if not isinstance(self.compressor, Sparsifier):
            size = dense_bytes(numel, dtype, self._wire)
            return [_gather([size] * group.size), Round("bcast", (size,), _BYTE, root=_SERVER)]
        count = self.compressor.expected(numel)
        # The union, as if ranks selected independently of each other.
        union = round(numel * (1 - (1 - count / numel) ** group.size)) if numel else 0
        gather = _gather([self._bytes(count, numel, dtype)] * group.size)
        replies = [Round("bcast", (1,), _COUNT, root=_SERVER), _reply(union, numel, dtype)]
        return [*([] if self.compressor.count(numel) is not None else [count_round(group)]), gather, *replies]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        if isinstance(self.compressor, Sparsifier):
            return (yield from self._exchange_sparse(self.compressor, accumulated, context))
        return (yield from self._exchange_dense(accumulated, context))

    @property
    def _wire(self) -> str | None:
        wire: str | None = getattr(self.compressor, "wire", None)
        return wire

    def _bytes(self, count: int, numel: int, dtype: np.dtype[Any]) -> int:
        assert isinstance(self.compressor, Sparsifier)
        return message_bytes(count, numel, dtype, self.compressor.wire_for(count, numel))

    def _exchange_dense(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, workspace, wire = context.group, context.workspace, self._wire
        numel, dtype = accumulated.numel, accumulated.dtype
        gather, reply = self.rounds(numel, dtype, group)
        size = reply.counts[0]
        array = accumulated.array()
        sent = array if wire is None else workspace.array("sent", numel, dtype)
        gather.send = workspace.array("message", size, _BYTE)
        moments, lost = accumulated.device_moments, plus(pack(array, wire, gather.send, sent), accumulated.lost)
        write_header(gather.send, numel, STALE * accumulated.stale, moments.energy, lost, moments.finite)
        reply.recv = workspace.array("reply", size, _BYTE)
        mean = workspace.array("mean", numel, dtype)
        if group.rank == _SERVER:
            gather.recv = workspace.array("messages", size * group.size, _BYTE)
        messages = yield gather
        problem: MessageError | None = None
        if group.rank == _SERVER:
            reply.send = workspace.array("answer", size, _BYTE)
            mean[:] = 0
            for message in messages.reshape(group.size, size):
                add(message, wire, mean)
            flags, energy, lost, problem = read_sent(self.id, messages.reshape(group.size, size), numel)
            finite = kernels.scale(mean, 1 / group.size)
            delivered = mean if wire is None else workspace.array("delivered", numel, dtype)
            pack(mean, wire, reply.send, delivered)
            if wire is not None:
                # The second rounding was of the mean: it took its error from every rank's share of it.
                lost += kernels.share_rounding(mean, delivered, group.size, array, sent)
            write_header(reply.send, numel, flags, energy, lost, finite)
        answer = yield reply
        flags, energy, lost, unread = read_answers(self.id, answer, [size], [numel], problem)
        if unread is not None:
            return undelivered(accumulated, unread, stale=False)
        unpack(answer, wire, mean)
        return Result.from_headers(mean, sent, float(numel), flags, energy, lost)

    def _exchange_sparse(self, compressor: Sparsifier, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, workspace = context.group, context.workspace
        numel, dtype = accumulated.numel, accumulated.dtype
        selection = compressor.select(accumulated, context)
        counts = [selection.indices.size] * group.size
        if compressor.count(numel) is None:
            counts = yield from gather_counts(self.id, counts[group.rank], numel, context)
        sizes = [self._bytes(count, numel, dtype) for count in counts]
        gather = _gather(sizes)
        gather.send = workspace.array("message", sizes[group.rank], _BYTE)
        wire = compressor.wire_for(counts[group.rank], numel)
        if wire.values is not None and np.may_share_memory(selection.values, accumulated.array()):
            selection = Selection(selection.indices, selection.values.copy())  # rounded in place below
        kept = selection.values if wire.values is None else kernels.energy(selection.values)
        flags, moments = STALE * accumulated.stale, accumulated.device_moments
        write_message(gather.send, selection, numel, wire, flags, moments.energy, kept, moments.finite)
        if group.rank == _SERVER:
            gather.recv = workspace.array("messages", sum(sizes), _BYTE)
        messages = yield gather

        announce = Round("bcast", (1,), _COUNT, root=_SERVER, recv=workspace.host_array("announced", 1, _COUNT))
        answer, problem = None, None
        if group.rank == _SERVER:
            try:
                count, answer = _average(messages, sizes, counts, numel, dtype, workspace)
                announce.send = np.array([count], _COUNT)
            except MessageError as error:
                problem = error
                announce.send = np.array([-1], _COUNT)
        sent = None if announce.send is None else (0, int(announce.send[0]))
        [count_sent] = check_counts(self.id, (yield announce), -1, numel, sent)
        if count_sent < 0:
            raise MessageError(f"parameter-server: rank {_SERVER} was sent a damaged message") from problem

        reply = _reply(count_sent, numel, dtype)
        reply.send = answer
        reply.recv = workspace.array("reply", reply.counts[0], _BYTE)
        received = yield reply
        mean: NDArray[np.floating] | LazyMean
        if _as_dense(count_sent, numel, dtype):
            mean = whole = workspace.array("mean", numel, dtype)
            flags, energy, lost, problem = read_answers(self.id, received, reply.counts, [numel], None)
            if problem is not None:
                return undelivered(accumulated, problem, stale=False)
            unpack(received, None, whole)
        else:
            try:
                union = parse_message(received, numel, dtype, workspace, count_sent)
            except MessageError as error:
                problem = MessageError(f"parameter-server: from rank {_SERVER}: {error}")
                return undelivered(accumulated, problem, stale=False)
            mean = LazyMean.of(numel, union.selection.indices, union.selection.values)
            flags, energy, lost = union.flags, union.energy, union.lost
        return Result.from_headers(mean, selection, sum(counts) / group.size, flags, energy, lost)


def _average(
    messages: NDArray[np.uint8],
    sizes: Sequence[int],
    counts: Sequence[int],
    numel: int,
    dtype: np.dtype[Any],
    workspace: Workspace,
) -> tuple[int, NDArray[np.uint8]]:
    """Return the number of elements in the union of sparse messages, and the reply that holds their mean."""
    mean = workspace.array("mean", numel, dtype)
    mean.fill(0)
    flags, energy, lost = 0, 0.0, 0.0
    start, room = 0, 0
    for rank, (size, expected) in enumerate(zip(sizes, counts, strict=True)):
        try:
            sparse = parse_message(messages[start : start + size], numel, dtype, workspace, expected)
        except MessageError as error:
            raise MessageError(f"parameter-server: from rank {rank}: {error}") from error
        start += size
        room += sparse.selection.indices.size
        kernels.scatter_add(sparse.selection.indices, sparse.selection.values, 1 / len(sizes), mean)
        flags |= sparse.flags
        energy += sparse.energy
        lost += sparse.lost
    flags |= NONFINITE * (not is_finite(mean, energy, len(sizes)))
    room = min(room, numel)
    union = Selection(workspace.array("union", room, np.uint32), workspace.array("union", room, dtype))
    [count] = to_python(kernels.select_above(mean, 0.0, 0, union.indices, union.values, 0))
    answer = workspace.array("answer", _reply(count, numel, dtype).counts[0], _BYTE)
    if _as_dense(count, numel, dtype):
        pack(mean, None, answer, mean)
        write_header(answer, numel, flags, energy, lost)
    else:
        union = Selection(union.indices[:count], union.values[:count])
        with np.errstate(invalid="ignore"):
            kept = float(np.float64(energy) - lost)
        write_message(answer, union, numel, _wire_back(count, numel), flags, energy, kept)
    return count, answer


def _gather(sizes: Sequence[int]) -> Round:
    return Round("gatherv", sizes, _BYTE, root=_SERVER)


def _wire_back(count: int, numel: int) -> Wire:
    return Wire(None, compact(count, numel))


def _as_dense(count: int, numel: int, dtype: np.dtype[Any]) -> bool:
    """Return whether the whole array is shorter than the union's message; the same on all ranks."""
    return dense_bytes(numel, dtype, None) <= message_bytes(count, numel, dtype, _wire_back(count, numel))


def _reply(count: int, numel: int, dtype: np.dtype[Any]) -> Round:
    size = message_bytes(count, numel, dtype, _wire_back(count, numel))
    return Round("bcast", (min(size, dense_bytes(numel, dtype, None)),), _BYTE, root=_SERVER)
