"""Every rank owns a part of the array: ranks send it packed to the owner, and the mean comes back packed."""

import math
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.dense import read_answers, read_sent
from mpicomp.collectives.scheme import Exchange, Memory, Result, Scheme, add_unless_zero, failed_result
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import CACHED_NUMEL, LARGEST_KEY, Quantiser, packers
from mpicomp.compressors.wire import HEADER_BYTES, NONFINITE, STALE, write_dense_header
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu
from mpicomp.mpi.rounds import Group, Round, parts_of
from mpicomp.registry import register

_BYTE = np.dtype(np.uint8)


@register
class TwoPhase(Scheme[Quantiser]):
    """Alltoallv of packed parts, a mean in rank order by each part's owner, Allgatherv of the means, packed once more.

    About twice the packed array leaves a rank, whatever the number of ranks. The first packing's error stays
    with the sender. An owner's own share of its part enters the mean as it is, so that its residual there holds nothing
    but what is lost the second time, times the number of ranks.
    """

    id: ClassVar[str] = "two-phase"
    precedence: ClassVar[int] = 10
    paper: ClassVar[str] = (
        "Seide et al. 2014 and the compressed allreduce of 1-bit Adam, Tang et al. 2021, arXiv 2102.02888; owners do "
        "not pack their own share, and their error, times the ranks, is part of the residual"
    )
    messages: ClassVar[str] = "packed"
    overwrites: ClassVar[bool] = True

    @classmethod
    def supports(cls, compressor: type[Compressor] | Compressor) -> bool:
        return super().supports(compressor) and compressor.averages

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        counts = [
            HEADER_BYTES + packer.packed_bytes for packer in packers(self.compressor, parts_of(numel, group.size))
        ]
        return [Round(operation, counts, _BYTE) for operation in ("alltoallv", "allgatherv")]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        packed = packers(self.compressor, parts_of(numel, group.size))
        size = HEADER_BYTES + max(packer.packed_bytes for packer in packed)
        piece = max(packer.numel for whole in packed for *_, packer in whole.pieces)
        sent = 0 if all(packer.packs_in_place for packer in packed) else numel * dtype.itemsize
        return Memory((2 * group.size + 1) * size + 2 * piece * dtype.itemsize + sent, group.size * size)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        workspace = context.workspace
        parts = parts_of(numel, group.size)
        packed = packers(self.compressor, parts)
        bounds = [0, *accumulate(parts)]
        mine = slice(bounds[group.rank], bounds[group.rank + 1])
        scatter, gather = self.rounds(numel, dtype, group)
        places = [0, *accumulate(scatter.counts)]
        in_place = all(packer.packs_in_place for packer in packed) and accumulated.overwrite("residual")
        sent = None if in_place else workspace.scratch("sent", numel, dtype)

        outgoing = workspace.scratch("outgoing", places[-1], _BYTE)
        losses: list[float] = []
        for rank in range(group.size):
            part = slice(bounds[rank], bounds[rank + 1])
            message = outgoing[places[rank] + HEADER_BYTES : places[rank + 1]]
            if rank == group.rank:  # behind the header to itself stands nothing that is read
                lost, own_part = 0.0, accumulated.part(part.start, part.stop)
            elif sent is None:
                lost = packed[rank].pack_in_place(accumulated, part.start, message, context.key(False, rank))
            else:
                array = accumulated.part(part.start, part.stop)
                lost = packed[rank].pack(array, message, sent[part], context.key(False, rank))
            losses.append(lost)
        losses[0] = add_unless_zero(losses[0], accumulated.lost)  # said once
        moments = accumulated.device_moments
        for rank, lost in enumerate(losses):
            message, flags = outgoing[places[rank] : places[rank + 1]], STALE * accumulated.stale
            write_dense_header(message, parts[rank], flags, moments.energy, lost, moments.finite)
        size = scatter.counts[group.rank]
        scatter.send = outgoing
        scatter.recv = workspace.scratch("incoming", size * group.size, _BYTE)
        incoming = (yield scatter).reshape(group.size, size)

        flags, energy, others_lost, problem = read_sent(self.id, incoming, parts[group.rank])
        share = 1 / group.size
        reply = workspace.scratch("reply", size, _BYTE)
        if sent is not None:
            sent[mine] = own_part
        losses = []
        key = context.key(False, group.rank)
        for elements, packed_bytes, number, packer in packed[group.rank].pieces:
            owned_piece = own_part[elements]
            total = workspace.scratch("total", packer.numel, dtype)
            np.multiply(owned_piece, dtype.type(share), out=total)
            place = HEADER_BYTES + packed_bytes.start
            for others in (incoming[: group.rank], incoming[group.rank + 1 :]):
                packer.unpack_add_all(others, place, share, total)
            delivered = workspace.scratch("delivered", total.size, dtype)
            message = reply[place : HEADER_BYTES + packed_bytes.stop]
            packer.pack(total, message, delivered, key + number & LARGEST_KEY)
            # This packing was of the mean: it took its error from every rank's share of it.
            chunk = CACHED_NUMEL if accumulated.kernels is cpu else max(1, total.size)
            for start in range(0, total.size, chunk):
                part = slice(start, start + chunk)
                owned = owned_piece[part]
                sent_part = owned.copy() if sent is None else sent[mine][elements][part]
                losses.append(kernels.share_rounding(total[part], delivered[part], group.size, owned, sent_part))
                if sent is None:
                    with np.errstate(over="ignore", invalid="ignore"):
                        np.subtract(owned, sent_part, out=owned)
        lost = sum(to_python(*losses))
        finite = math.isfinite(lost)
        if not finite:  # squares of finite numbers overflow too, and are then not worth a fast answer
            with np.errstate(over="ignore", invalid="ignore"):
                finite = bool(np.isfinite(own_part if sent is None else own_part - sent[mine]).all())
        flags |= NONFINITE * (not finite)
        write_dense_header(reply, parts[group.rank], flags, energy, lost + others_lost)
        gather.send = reply
        gather.recv = workspace.array("replies", places[-1], _BYTE)
        replies = yield gather

        flags, energy, lost, problem = read_answers(self.id, replies, scatter.counts, parts, problem)
        if problem is not None:
            return failed_result(accumulated, problem, stale=False)

        def write(out: NDArray[np.floating]) -> None:
            for rank in range(group.size):
                message = replies[places[rank] : places[rank + 1]]
                packed[rank].unpack(message[HEADER_BYTES:], out[bounds[rank] : bounds[rank + 1]])

        if sent is None:
            sent = accumulated.array()
        return Result.from_headers(write, sent, float(numel), flags, energy, lost)
