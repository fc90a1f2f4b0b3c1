"""Sums of whole arrays by the transport, by ranks that each own a part of the array, and by one server."""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import (
    Exchange,
    MeanWriter,
    Memory,
    Result,
    Scheme,
    add_unless_zero,
    check_undamaged,
    failed_result,
)
from mpicomp.compressors.accumulated import TRAILER, Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.wire import (
    DAMAGED,
    STALE,
    add_dense,
    dense_bytes,
    read_dense,
    read_dense_header,
    read_dense_headers,
    write_dense,
    write_dense_header,
)
from mpicomp.errors import MessageError
from mpicomp.gpu import to_python
from mpicomp.mpi.rounds import Group, Round, parts_of
from mpicomp.registry import register

_BYTE = np.dtype(np.uint8)
_SERVER = 0  # rank


@register
class Allreduce(Scheme[Dense]):
    """Allreduce of the whole array, with two flags and two energies behind it that are summed along.

    16-bit wires never go through a library's sum (there is no bfloat16 in it, and it would round at every hop),
    and a library whose sums differ between ranks cannot give the mean: both take `ScatterReduce` instead.
    """

    id: ClassVar[str] = "allreduce"
    precedence: ClassVar[int] = 1
    paper: ClassVar[str] = "none: MPI_Allreduce"
    messages: ClassVar[str] = "dense"
    overwrites: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        if not self._summable(group):
            return ScatterReduce(self.compressor).rounds(numel, dtype, group, step)
        return [Round("allreduce", (numel + TRAILER,), dtype)]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        return Memory(0, 0) if self._summable(group) else ScatterReduce(self.compressor).memory(numel, dtype, group)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, numel = context.group, accumulated.numel
        if self.compressor.wire is not None or not group.identical_sums:
            return (yield from ScatterReduce(self.compressor).exchange(accumulated, context))
        workspace, dtype = context.workspace, accumulated.dtype
        is_divided = accumulated.divide(group.size)
        send, recv = accumulated.with_trailer(), accumulated.memory_of_mean(workspace)
        whole = yield Round("allreduce", (numel + TRAILER,), dtype, send=send, recv=recv)
        mean, finite = workspace.part(whole, numel), None
        if not is_divided:
            [finite] = to_python(accumulated.kernels.scale(mean, 1 / group.size))
        return Result.from_trailer(accumulated, mean, whole[numel:], group.size, finite)

    def _summable(self, group: Group) -> bool:
        return self.compressor.wire is None and group.identical_sums


@register
class ScatterReduce(Scheme[Dense]):
    """Alltoallv of parts, a sum in rank order by each part's owner, Allgatherv of the sums.

    As many bytes as a ring, in two messages for each pair of ranks, and sums that do not depend on how a library
    orders them. With a 16-bit wire every value is rounded exactly twice, whatever the number of ranks: at
    the sender, and when the owner sends the mean. The owner takes the second error, times the number of
    ranks, into its residual.
    """

    id: ClassVar[str] = "scatter-reduce"
    precedence: ClassVar[int] = 3
    paper: ClassVar[str] = "Rabenseifner 2004 in shape; summed in rank order"
    messages: ClassVar[str] = "dense"
    overwrites: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        parts = parts_of(numel, group.size)
        known = {part: dense_bytes(part, dtype, self.compressor.wire) for part in set(parts)}
        counts = [known[part] for part in parts]
        return [Round(operation, counts, np.dtype(np.uint8)) for operation in ("alltoallv", "allgatherv")]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        wire, part = self.compressor.wire, max(parts_of(numel, group.size))
        size = dense_bytes(part, dtype, wire)
        whole, total = size * group.size, part * dtype.itemsize
        if wire is None:
            return Memory(2 * whole + size + total, 0)
        return Memory(2 * whole + size + 2 * total + numel * dtype.itemsize, whole)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        wire = self.compressor.wire
        workspace = context.workspace
        array = accumulated.array()
        parts = parts_of(numel, group.size)
        bounds = np.concatenate(([0], np.cumsum(parts)))
        scatter, gather = self.rounds(numel, dtype, group)
        places = np.concatenate(([0], np.cumsum(scatter.counts)))
        sent = array if wire is None else workspace.scratch("sent", numel, dtype)

        outgoing = workspace.scratch("outgoing", places[-1], np.uint8)
        left_out, moments = accumulated.lost, accumulated.device_moments
        for rank in range(group.size):
            part = slice(bounds[rank], bounds[rank + 1])
            message = outgoing[places[rank] : places[rank + 1]]
            lost = write_dense(array[part], wire, message, sent[part])
            lost, flags = add_unless_zero(lost, left_out), STALE * accumulated.stale
            write_dense_header(message, parts[rank], flags, moments.energy, lost, moments.finite)
            left_out = 0.0  # said once
        size = scatter.counts[group.rank]
        scatter.send = outgoing
        scatter.recv = workspace.scratch("incoming", size * group.size, np.uint8)
        incoming = (yield scatter).reshape(group.size, size)

        flags, energy, lost, problem = read_sent(self.id, incoming, parts[group.rank])
        mine = slice(bounds[group.rank], bounds[group.rank + 1])
        total = workspace.scratch("total", parts[group.rank], dtype)
        total[:] = 0
        for message in incoming:
            add_dense(message, wire, total)
        finite = kernels.scale(total, 1 / group.size)

        reply = workspace.scratch("reply", size, np.uint8)
        delivered = total if wire is None else workspace.scratch("delivered", total.size, dtype)
        write_dense(total, wire, reply, delivered)
        if wire is not None and total.size:
            # The second rounding was of the mean: it took its error from every rank's share of it.
            lost += kernels.share_rounding(total, delivered, group.size, array[mine], sent[mine])
        write_dense_header(reply, parts[group.rank], flags, energy, lost, finite)
        gather.send = reply
        # Answers in 16 bits hold the mean until it is written; others are read at once, and come to where what was sent
        # is no longer needed.
        gather.recv = outgoing if wire is None else workspace.array("replies", places[-1], np.uint8)
        replies = yield gather

        flags, energy, lost, problem = read_answers(self.id, replies, scatter.counts, parts, problem)
        if problem is not None:
            return failed_result(accumulated, problem, stale=False)

        def write(out: NDArray[np.floating]) -> None:
            for rank in range(group.size):
                read_dense(replies[places[rank] : places[rank + 1]], wire, out[bounds[rank] : bounds[rank + 1]])

        mean: NDArray[np.floating] | MeanWriter = write
        if wire is None:
            mean = accumulated.memory_of_mean(workspace)[:numel]
            write(mean)
        return Result.from_headers(mean, sent, float(numel), flags, energy, lost)


@register
class ParameterServer(Scheme[Dense]):
    """Gatherv to rank 0, which decodes in rank order, and Bcast of the mean, which all ranks decode, rank 0 too.

    Two steps whatever the number of ranks, but all bytes pass through the link of one of them.

    With a 16-bit wire rank 0 takes the error of the second rounding, times the number of ranks, into its residual.
    """

    id: ClassVar[str] = "parameter-server"
    precedence: ClassVar[int] = 90
    paper: ClassVar[str] = "Li et al. 2014 (OSDI) in shape; one server, which is a worker too"
    messages: ClassVar[str] = "dense"
    overwrites: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        size = dense_bytes(numel, dtype, self.compressor.wire)
        gather = Round("gatherv", [size] * group.size, _BYTE, root=_SERVER)
        return [gather, Round("bcast", (size,), _BYTE, root=_SERVER)]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        size, wire = dense_bytes(numel, dtype, self.compressor.wire), self.compressor.wire
        rounded = 0 if wire is None else 3 * numel * dtype.itemsize
        return Memory((group.size + 2 + (wire is None)) * size + rounded, 0 if wire is None else size)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, workspace, wire = context.group, context.workspace, self.compressor.wire
        numel, dtype = accumulated.numel, accumulated.dtype
        gather, reply = self.rounds(numel, dtype, group)
        size = reply.counts[0]
        array = accumulated.array()
        sent = array if wire is None else workspace.scratch("sent", numel, dtype)
        gather.send = workspace.scratch("outgoing", size, _BYTE)
        moments = accumulated.device_moments
        lost = add_unless_zero(write_dense(array, wire, gather.send, sent), accumulated.lost)
        write_dense_header(gather.send, numel, STALE * accumulated.stale, moments.energy, lost, moments.finite)
        # An answer in 16 bits holds the mean until it is written.
        reply.recv = (workspace.scratch if wire is None else workspace.array)("reply", size, _BYTE)
        if wire is None:
            mean = accumulated.memory_of_mean(workspace)[:numel]
        else:
            mean = workspace.scratch("total", numel if group.rank == _SERVER else 0, dtype)
        if group.rank == _SERVER:
            gather.recv = workspace.scratch("incoming", size * group.size, _BYTE)
        messages = yield gather
        problem: MessageError | None = None
        if group.rank == _SERVER:
            reply.send = workspace.scratch("answer", size, _BYTE)
            mean[:] = 0
            for message in messages.reshape(group.size, size):
                add_dense(message, wire, mean)
            flags, energy, lost, problem = read_sent(self.id, messages.reshape(group.size, size), numel)
            finite = kernels.scale(mean, 1 / group.size)
            delivered = mean if wire is None else workspace.scratch("delivered", numel, dtype)
            write_dense(mean, wire, reply.send, delivered)
            if wire is not None:
                # The second rounding was of the mean: it took its error from every rank's share of it.
                lost += kernels.share_rounding(mean, delivered, group.size, array, sent)
            write_dense_header(reply.send, numel, flags, energy, lost, finite)
        answer = yield reply
        flags, energy, lost, unread = read_answers(self.id, answer, [size], [numel], problem)
        if unread is not None:
            return failed_result(accumulated, unread, stale=False)
        write = functools.partial(read_dense, answer, wire)
        if wire is not None:
            return Result.from_headers(write, sent, float(numel), flags, energy, lost)
        write(mean)
        return Result.from_headers(mean, sent, float(numel), flags, energy, lost)


def read_sent(
    collective: str, messages: NDArray[np.uint8], count: int
) -> tuple[int, float, float, MessageError | None]:
    """Read the messages that an owner received; return flags for the answer, energy, lost energy, and the error."""
    try:
        return *read_dense_headers(messages, count), None
    except MessageError as error:
        return DAMAGED, 0.0, 0.0, MessageError(f"{collective}: {error}")


def read_answers(
    collective: str,
    messages: NDArray[np.uint8],
    sizes: Sequence[int],
    counts: Sequence[int],
    problem: MessageError | None,
) -> tuple[int, float, float, MessageError | None]:
    """Read the answers of all owners; where some owner could not read what it was sent, raise on all ranks."""
    flags, energy, lost, start = 0, 0.0, 0.0, 0
    unread: MessageError | None = None
    for rank, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        try:
            # All say the same energy
            seen, energy, lost_part = read_dense_header(messages[start : start + size], count)
            flags, lost = flags | seen, lost + lost_part
        except MessageError as error:
            unread = unread or MessageError(f"{collective}: from rank {rank}: {error}")
        start += size
    check_undamaged(collective, flags, problem)
    return flags, energy, lost, unread
