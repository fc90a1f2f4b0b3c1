"""Every rank's packed array to every rank, which all decode in rank order."""

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.scheme import Exchange, LazyMean, Memory, Result, Scheme, far_from_largest, plus, undelivered
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import Quantiser, packers
from mpicomp.compressors.wire import HEADER_BYTES, STALE, read_dense_headers, write_dense_header
from mpicomp.errors import MessageError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round

_BYTE = np.dtype(np.uint8)


@register
class PackedAllgather(Scheme[Quantiser]):
    """Allgatherv of packed arrays; the mean is that of what was packed, and nothing is packed twice.

    What leaves a rank grows with the number of ranks, and so does decoding: for few ranks, short arrays, and where the
    second packing of `TwoPhase` would cost more than its bytes save.
    """

    id: ClassVar[str] = "packed-allgather"
    precedence: ClassVar[int] = 11
    paper: ClassVar[str] = "the exchange of QSGD, Alistarh et al. 2017, arXiv 1610.02132"
    messages: ClassVar[str] = "packed"
    overwrites: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        [packer] = packers(self.compressor, [numel])
        return [Round("allgatherv", [HEADER_BYTES + packer.packed_bytes] * group.size, _BYTE)]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        [packer] = packers(self.compressor, [numel])
        size = HEADER_BYTES + packer.packed_bytes
        return Memory(size + (0 if packer.packs_in_place else numel * dtype.itemsize), group.size * size)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        workspace = context.workspace
        [packer] = packers(self.compressor, [numel])
        [gather] = self.rounds(numel, dtype, group)
        size = gather.counts[group.rank]
        in_place = accumulated.may_be_overwritten and packer.packs_in_place
        message = workspace.scratch("outgoing", size, _BYTE)
        packed, key = message[HEADER_BYTES:], context.key(False)
        if in_place:
            lost, sent = packer.pack_in_place(accumulated, 0, packed, key), accumulated.array()
        else:
            sent = workspace.scratch("sent", numel, dtype)
            lost = packer.pack(accumulated.array(), packed, sent, key)
        moments, lost = accumulated.device_moments, plus(lost, accumulated.lost)
        write_dense_header(message, numel, STALE * accumulated.stale, moments.energy, lost, moments.finite)
        gather.send = message
        gather.recv = workspace.array("messages", size * group.size, _BYTE)
        messages = (yield gather).reshape(group.size, size)

        try:
            flags, energy, lost = read_dense_headers(messages, numel)
        except MessageError as error:
            return undelivered(accumulated, MessageError(f"packed-allgather: {error}"), False)

        def write(out: NDArray[np.floating]) -> None:
            packer.unpack_sum(messages, HEADER_BYTES, 1 / group.size, out)

        mean = LazyMean(numel, dtype, write)
        bad = False
        if not far_from_largest(energy * group.size, dtype):
            written = workspace.scratch("written mean", numel, dtype)
            mean.write(written)
            bad = not np.isfinite(written).all()
        leaves = "residual" if in_place else "sum"
        if not self.compressor.averages:  # what wins is every rank's share, whatever its own sign
            sent, lost = mean.in_workspace(workspace), math.nan
        return Result.from_headers(mean, sent, float(numel), flags, energy, lost, bad, leaves)
