"""Every rank's packed array to every rank, which all decode in rank order."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.dense_message import HEADER, read_header, write_header
from mpicomp.collectives.round import Group, Round
from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme, flags_of, gain_of
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Quantiser
from mpicomp.compressors.message import NONFINITE, STALE

_BYTE = np.dtype(np.uint8)


class PackedAllgather(Scheme[Quantiser]):
    """Allgatherv of packed arrays; the mean is that of what was packed, and nothing is packed twice.

    What leaves a rank grows with the number of ranks, and so does decoding: for few ranks, short arrays, and where the
    second packing of `TwoPhase` would cost more than its bytes save.
    """

    id: ClassVar[str] = "packed-allgather"
    paper: ClassVar[str] = "the exchange of QSGD, Alistarh et al. 2017, arXiv 1610.02132"
    messages: ClassVar[str] = "packed"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """One allgatherv of bytes; see `Scheme.rounds`."""
        return [Round("allgatherv", [HEADER.itemsize + self.compressor.packed_bytes(numel)] * group.size, _BYTE)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Pack, gather, decode; see `Scheme.exchange`."""
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        compressor, workspace = self.compressor, context.workspace
        [gather] = self.rounds(numel, dtype, group)
        size = gather.counts[group.rank]
        sent = workspace.array("sent", numel, dtype)
        message = workspace.array("message", size, _BYTE)
        lost = compressor.pack(accumulated.array(), message[HEADER.itemsize :], sent, context.key(False))
        write_header(message, flags_of(accumulated), accumulated.energy, lost + accumulated.lost)
        gather.send = message
        gather.recv = workspace.array("messages", size * group.size, _BYTE)
        messages = (yield gather).reshape(group.size, size)

        mean = workspace.array("mean", numel, dtype)
        mean[:] = 0
        flags, energy, lost = 0, 0.0, 0.0
        for own in messages:
            compressor.unpack_add(own[HEADER.itemsize :], 1 / group.size, mean)
            seen, own_energy, own_lost = read_header(own)
            flags |= seen
            energy += own_energy
            lost += own_lost
        return Result(
            mean=mean,
            sent=sent,
            energy=energy,
            gain=gain_of(lost, energy),
            kept=float(numel),
            nonfinite=bool(flags & NONFINITE),
            stale=bool(flags & STALE),
        )
