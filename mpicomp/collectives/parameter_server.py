"""One rank gathers everybody's messages, averages them and sends the mean to all."""

import functools
from typing import Any, ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.collectives.regions import read_answers, read_sent
from mpicomp.collectives.scheme import Exchange, LazyMean, Memory, Result, Scheme, plus, undelivered
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.wire import STALE, add_dense, dense_bytes, read_dense, write_dense, write_dense_header
from mpicomp.errors import MessageError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round

_BYTE = np.dtype(np.uint8)
_SERVER = 0


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
        moments, lost = accumulated.device_moments, plus(write_dense(array, wire, gather.send, sent), accumulated.lost)
        write_dense_header(gather.send, numel, STALE * accumulated.stale, moments.energy, lost, moments.finite)
        # An answer in 16 bits holds the mean until it is written.
        reply.recv = (workspace.scratch if wire is None else workspace.array)("reply", size, _BYTE)
        overwrites = accumulated.may_be_overwritten and wire is None
        if wire is not None:
            mean = workspace.scratch("total", numel if group.rank == _SERVER else 0, dtype)
        else:
            mean = array if overwrites else workspace.array("mean", numel, dtype)
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
            return undelivered(accumulated, unread, stale=False)
        if wire is not None:
            lazy = LazyMean(numel, dtype, functools.partial(read_dense, answer, wire))
            return Result.from_headers(lazy, sent, float(numel), flags, energy, lost)
        read_dense(answer, wire, mean)
        leaves = "mean" if overwrites else "sum"
        return Result.from_headers(mean, sent, float(numel), flags, energy, lost, leaves=leaves)
