"""Sums of whole arrays: by the transport, by ranks that each own a part of the array, and by one server."""

import functools
import math
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
    gain_of,
    slices_of,
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
from mpicomp.mpi.rounds import FLAGS, MIN_SHARED, Group, Round, Rounds, parts_of
from mpicomp.registry import register
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)
_SERVER = 0  # rank


@register
class Allreduce(Scheme[Dense]):
    """Allreduce of the whole array, with two flags and two energies behind it that are summed along.

    A few ranks of one host sum long arrays in memory that they share, each its own part: no sweep copies a gradient
    that lies in one piece to a bucket first, nor does another one divide the sum.

    16-bit wires never go through a library's sum (there is no bfloat16 in it, and it would round at every hop),
    and a library whose sums differ between ranks cannot give the mean: both take `ScatterReduce` instead.
    """

    id: ClassVar[str] = "allreduce"
    precedence: ClassVar[int] = 1
    paper: ClassVar[str] = "none: MPI_Allreduce; long arrays on one host in shared memory, in rank order"
    messages: ClassVar[str] = "dense"
    overwrites: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        if self._shares_memory(numel, group):
            return [HostSum(numel, dtype, group).round]
        if not self._summable(group):
            return ScatterReduce(self.compressor).rounds(numel, dtype, group, step)
        return [Round("allreduce", (numel + TRAILER,), dtype)]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        summed = self._summable(group) or self._shares_memory(numel, group)
        return Memory(0, 0) if summed else ScatterReduce(self.compressor).memory(numel, dtype, group)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, workspace = context.group, context.workspace
        if self._shares_memory(accumulated.numel, group) and isinstance(accumulated.memory, np.ndarray):
            host_sum = workspace.prepared.get((self, HostSum))
            if host_sum is None or host_sum.shape != (accumulated.numel, accumulated.dtype, group):
                host_sum = workspace.prepared[self, HostSum] = HostSum(accumulated.numel, accumulated.dtype, group)
            return (yield from host_sum.exchange(accumulated, workspace))
        if not self._summable(group):
            return (yield from ScatterReduce(self.compressor).exchange(accumulated, context))
        is_divided = accumulated.divide(group.size)
        send, recv = accumulated.with_trailer(), accumulated.memory_of_mean(workspace)
        prepared = workspace.prepared.get(self)
        if prepared is None or prepared[0].send is not send or prepared[0].recv is not recv:
            task = Round("allreduce", (send.size,), accumulated.dtype, send=send, recv=recv)
            prepared = workspace.prepared[self] = task, recv[: accumulated.numel], recv[accumulated.numel :]
        task, mean, trailer = prepared
        yield task
        finite = None
        if not is_divided:
            [finite] = to_python(accumulated.kernels.scale(mean, 1 / group.size))
        return Result.from_trailer(accumulated, mean, trailer, group.size, finite)

    def _summable(self, group: Group) -> bool:
        return self.compressor.wire is None and group.identical_sums

    def _shares_memory(self, numel: int, group: Group) -> bool:
        return self.compressor.wire is None and group.shares_memory and numel >= MIN_SHARED


class HostSum:
    """The mean of an array that ranks of a host sum in the memory that they share, with flags and energies.

    The sum reads the memory where the gradient lies, and writes the mean.
    """

    def __init__(self, numel: int, dtype: np.dtype[Any], group: Group) -> None:
        self.shape = numel, dtype, group
        self.round = Round("allreduce", (numel,), dtype, factor=1 / group.size, flags=np.empty(FLAGS))
        """The only round, without arrays between steps."""
        self._memory: NDArray[np.floating] | None = None  # of the last mean
        self._mean: NDArray[np.floating] | None = None

    def exchange(self, accumulated: Accumulated, workspace: Workspace) -> Exchange:
        """Average over the ranks; see `Scheme.exchange`."""
        energy, gradient = math.nan, accumulated.lent()
        if gradient is None:
            gradient = accumulated.array()
            energy = accumulated.energy
        memory = accumulated.memory_of_mean(workspace)
        if memory is not self._memory:
            self._mean = accumulated.whole if memory is accumulated.memory else memory[: accumulated.numel]
            self._memory = memory
        task, mean = self.round, self._mean
        assert task.flags is not None
        assert mean is not None
        task.send, task.recv = gradient, mean
        task.flags[:] = accumulated.stale, energy, accumulated.lost
        yield task
        task.send = task.calls_made = None  # else the record of the step would keep the gradient
        stale, energy, lost = task.flags.tolist()
        gain = 1.0 if lost == 0 else gain_of(lost, energy)
        return Result(mean, accumulated.whole, energy, gain, float(accumulated.numel), not task.finite, stale > 0)


@register
class ScatterReduce(Scheme[Dense]):
    """Alltoallv of parts, a sum in rank order by each part's owner, Allgatherv of the sums.

    As many bytes as a ring, in two messages for each pair of ranks. With a 16-bit wire every value is rounded twice,
    whatever the number of ranks: at the sender, and when the owner sends the mean; the owner's residual takes the
    second error, times the number of ranks.
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
        return [Round(operation, counts, _BYTE) for operation in ("alltoallv", "allgatherv")]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        wire, part = self.compressor.wire, max(parts_of(numel, group.size))
        size = dense_bytes(part, dtype, wire)
        whole, total = size * group.size, part * dtype.itemsize
        if wire is None:
            return Memory(2 * whole + size + total, 0)
        return Memory(2 * whole + size + 2 * total + numel * dtype.itemsize, whole)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        numel, dtype, wire = accumulated.numel, accumulated.dtype, self.compressor.wire
        workspace, array = context.workspace, accumulated.array()
        sent = array if wire is None else workspace.scratch("sent", numel, dtype)
        owners = OwnerRounds(self, accumulated, context)
        parts = zip(owners.spans, owners.outgoing, strict=True)
        losses = [write_dense(array[span], wire, message, sent[span]) for span, message in parts]
        incoming = yield from owners.scatter(losses)

        total = workspace.scratch("total", owners.counts[owners.rank], dtype)
        finite, lost = average_at_owner(
            wire, incoming, total, owners.reply, array[owners.span], sent[owners.span], workspace
        )
        # Answers in 16 bits hold the mean until it is written; others are read at once.
        problem = yield from owners.gather(lost, finite, is_kept=wire is not None)
        if problem is not None:
            return failed_result(accumulated, problem, stale=False)

        def write(out: NDArray[np.floating]) -> None:
            for span, message in zip(owners.spans, owners.replies, strict=True):
                read_dense(message, wire, out[span])

        mean: NDArray[np.floating] | MeanWriter = write
        if wire is None:
            mean = accumulated.memory_of_mean(workspace)[:numel]
            write(mean)
        return Result.from_headers(mean, sent, float(numel), owners.flags, owners.energy, owners.lost)


@register
class ParameterServer(Scheme[Dense]):
    """Gatherv to rank 0, which decodes in rank order, and Bcast of the mean, which all ranks decode, rank 0 too.

    Two steps whatever the number of ranks, but all bytes pass through the link of one of them. With a 16-bit wire rank
    0 takes the error of the second rounding, times the number of ranks, into its residual.
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
            messages = messages.reshape(group.size, size)
            finite, lost = average_at_owner(wire, messages, mean, reply.send, array, sent, workspace)
            flags, energy, lost_before, problem = read_at_owner(self.id, messages, numel)
            write_dense_header(reply.send, numel, flags, energy, lost_before + lost, finite)
        answer = yield reply
        flags, energy, lost, unread = read_answers(self.id, [answer], [numel], problem)
        if unread is not None:
            return failed_result(accumulated, unread, stale=False)
        result = Result.from_headers(mean, sent, float(numel), flags, energy, lost)
        if wire is None:
            read_dense(answer, wire, mean)
        else:
            result.mean = functools.partial(read_dense, answer, wire)
        return result


def average_at_owner(
    wire: str | None,
    messages: NDArray[np.uint8],
    total: NDArray[np.floating],
    reply: NDArray[np.uint8],
    array: NDArray[np.floating],
    sent: NDArray[np.floating],
    workspace: Workspace,
) -> tuple[bool, float]:
    """Write the mean of messages to ``total`` and ``reply``; return whether it is finite, and the energy lost."""
    total[:] = 0
    for message in messages:
        add_dense(message, wire, total)
    ranks = len(messages)
    finite: bool = kernels.scale(total, 1 / ranks)
    delivered = total if wire is None else workspace.scratch("delivered", total.size, total.dtype)
    write_dense(total, wire, reply, delivered)
    if wire is None or not total.size:
        return finite, 0.0
    # The second rounding was of the mean: it took its error from every rank's share of it.
    return finite, kernels.share_rounding(total, delivered, ranks, array, sent)


def read_at_owner(
    collective: str, messages: NDArray[np.uint8], count: int
) -> tuple[int, float, float, MessageError | None]:
    """Read the messages that an owner received; return flags for the answer, energy, lost energy, and the error."""
    try:
        return *read_dense_headers(messages, count), None
    except MessageError as error:
        return DAMAGED, 0.0, 0.0, MessageError(f"{collective}: {error}")


def read_answers(
    collective: str, messages: Sequence[NDArray[np.uint8]], counts: Sequence[int], problem: MessageError | None
) -> tuple[int, float, float, MessageError | None]:
    """Read the answers of all owners; raise on all ranks if some owner has a ``problem`` with a message to it."""
    flags, energy, lost = 0, 0.0, 0.0
    unread: MessageError | None = None
    for rank, (message, count) in enumerate(zip(messages, counts, strict=True)):
        try:
            seen, energy, lost_part = read_dense_header(message, count)  # all have the same energy
            flags, lost = flags | seen, lost + lost_part
        except MessageError as error:
            unread = unread or MessageError(f"{collective}: from rank {rank}: {error}")
    check_undamaged(collective, flags, problem)
    return flags, energy, lost, unread


class OwnerRounds:
    """Two rounds among ranks of which each owns a part of the array: parts go to their owners, and means to all."""

    replies: list[NDArray[np.uint8]]
    """Of `gather`: the message of each owner."""

    def __init__(self, scheme: Scheme[Any], accumulated: Accumulated, context: Context) -> None:
        self._name, self._accumulated, self._workspace = scheme.id, accumulated, context.workspace
        self._scatter, self._gather = scheme.rounds(accumulated.numel, accumulated.dtype, context.group)
        self.rank = context.group.rank
        self.counts = parts_of(accumulated.numel, context.group.size)
        """Elements of each rank's part."""
        self.spans = slices_of(self.counts)
        self.span = self.spans[self.rank]
        sizes = self._scatter.counts
        self._places = slices_of(sizes)
        self._whole = self._workspace.scratch("outgoing", sum(sizes), _BYTE)
        self.outgoing = [self._whole[place] for place in self._places]
        """The message to each owner, whose header `scatter` writes."""
        self.reply = self._workspace.scratch("reply", sizes[self.rank], _BYTE)
        """This owner's message to all, whose header `gather` writes."""
        self.flags, self.energy, self.lost = 0, 0.0, 0.0
        self._problem: MessageError | None = None

    def scatter(self, losses: list[float]) -> Rounds[NDArray[np.uint8]]:
        """Send messages, of which each has lost some energy; return those to this owner, one a row."""
        accumulated, task = self._accumulated, self._scatter
        moments, flags = accumulated.device_moments, STALE * accumulated.stale
        losses[0] = add_unless_zero(losses[0], accumulated.lost)  # in one of the messages
        for message, count, lost in zip(self.outgoing, self.counts, losses, strict=True):
            write_dense_header(message, count, flags, moments.energy, lost, moments.finite)
        task.send, ranks, size = self._whole, len(self.counts), self.reply.size
        task.recv = self._workspace.scratch("incoming", size * ranks, _BYTE)
        incoming: NDArray[np.uint8] = (yield task).reshape(ranks, size)
        self.flags, self.energy, self.lost, self._problem = read_at_owner(self._name, incoming, self.counts[self.rank])
        return incoming

    def gather(self, lost: float, finite: bool, is_kept: bool) -> Rounds[MessageError | None]:
        """Send this owner's message, which has lost some energy, to all; return the error of an unreadable answer.

        Answers are kept until the step ends (``is_kept``) or take the place of the messages to owners.
        """
        task, name = self._gather, self._name
        write_dense_header(self.reply, self.counts[self.rank], self.flags, self.energy, lost + self.lost, finite)
        task.send, task.recv = self.reply, self._whole
        if is_kept:
            task.recv = self._workspace.array("replies", self._whole.size, _BYTE)
        received = yield task
        self.replies = [received[place] for place in self._places]
        self.flags, self.energy, self.lost, problem = read_answers(name, self.replies, self.counts, self._problem)
        return problem
