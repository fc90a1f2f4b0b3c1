"""Every rank owns a part of the array: it sums the selections that all ranks send of it and hands the sum to all."""

from typing import Any, ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.collectives.dense_message import add, dense_bytes, pack, unpack, write_header
from mpicomp.collectives.regions import read_answers, read_sent
from mpicomp.collectives.scheme import Exchange, Result, Scheme, plus, undelivered
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.wire_format import STALE
from mpicomp.registry import register
from mpicomp.rounds import Group, Round, parts_of


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

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        parts = parts_of(numel, group.size)
        known = {part: dense_bytes(part, dtype, self.compressor.wire) for part in set(parts)}
        counts = [known[part] for part in parts]
        return [Round(operation, counts, np.dtype(np.uint8)) for operation in ("alltoallv", "allgatherv")]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        wire = self.compressor.wire
        workspace = context.workspace
        array = accumulated.array()
        parts = parts_of(numel, group.size)
        bounds = np.concatenate(([0], np.cumsum(parts)))
        scatter, gather = self.rounds(numel, dtype, group)
        places = np.concatenate(([0], np.cumsum(scatter.counts)))
        sent = array if wire is None else workspace.array("sent", numel, dtype)

        outgoing = workspace.array("outgoing", places[-1], np.uint8)
        left_out, moments = accumulated.lost, accumulated.device_moments
        for rank in range(group.size):
            part = slice(bounds[rank], bounds[rank + 1])
            message = outgoing[places[rank] : places[rank + 1]]
            lost = pack(array[part], wire, message, sent[part])
            lost, flags = plus(lost, left_out), STALE * accumulated.stale
            write_header(message, parts[rank], flags, moments.energy, lost, moments.finite)
            left_out = 0.0  # said once
        size = scatter.counts[group.rank]
        scatter.send = outgoing
        scatter.recv = workspace.array("incoming", size * group.size, np.uint8)
        incoming = (yield scatter).reshape(group.size, size)

        flags, energy, lost, problem = read_sent(self.id, incoming, parts[group.rank])
        mine = slice(bounds[group.rank], bounds[group.rank + 1])
        total = workspace.array("total", parts[group.rank], dtype)
        total[:] = 0
        for message in incoming:
            add(message, wire, total)
        finite = kernels.is_finite(kernels.scale(total, 1 / group.size), dtype)

        reply = workspace.array("reply", size, np.uint8)
        delivered = total if wire is None else workspace.array("delivered", total.size, dtype)
        pack(total, wire, reply, delivered)
        if wire is not None and total.size:
            # The second rounding was of the mean: it took its error from every rank's share of it.
            lost += kernels.share_rounding(total, delivered, group.size, array[mine], sent[mine])
        write_header(reply, parts[group.rank], flags, energy, lost, finite)
        gather.send = reply
        gather.recv = workspace.array("replies", places[-1], np.uint8)
        replies = yield gather

        flags, energy, lost, problem = read_answers(self.id, replies, scatter.counts, parts, problem)
        if problem is not None:
            return undelivered(accumulated, problem, stale=False)
        mean = workspace.array("mean", numel, dtype)
        for rank in range(group.size):
            unpack(replies[places[rank] : places[rank + 1]], wire, mean[bounds[rank] : bounds[rank + 1]])
        return Result.from_headers(mean, sent, float(numel), flags, energy, lost)
