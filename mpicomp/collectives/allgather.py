"""Every rank's sparse message to every rank, which all decode in rank order."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.round import Group, Round
from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme, flags_of, gain_of
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Selection, Sparsifier
from mpicomp.compressors.message import NONFINITE, STALE, Wire, message_bytes, read_message, write_message
from mpicomp.errors import MessageError
from mpicomp.kernels import cpu

_COUNT = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)
_WIRE = Wire(None, "plain")


class Allgather(Scheme[Sparsifier]):
    """Allgatherv of sparse messages with their true lengths.

    Where the compressor selects a fixed number of elements the lengths are known and nothing is asked; where
    the values decide, one round of one integer a rank comes first. A rank may select nothing.
    """

    id: ClassVar[str] = "allgather"
    paper: ClassVar[str] = "none: MPI_Allgatherv of sparse messages"
    messages: ClassVar[str] = "sparse"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """One allgatherv, with one for the lengths before it where they vary; see `Scheme.rounds`."""
        count = self.compressor.count(numel)
        if count is not None:
            return [Round("allgatherv", [message_bytes(count, numel, dtype, _WIRE)] * group.size, _BYTE)]
        per_element = self.compressor.wire_bytes_per_element(dtype.itemsize)
        expected = round(numel * per_element / (4 + dtype.itemsize))
        return [
            Round("allgatherv", [1] * group.size, _COUNT),
            Round("allgatherv", [message_bytes(expected, numel, dtype, _WIRE)] * group.size, _BYTE),
        ]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Select, gather, decode; see `Scheme.exchange`."""
        group, workspace, dtype = context.group, context.workspace, accumulated.dtype
        selection = self.compressor.select(accumulated, context.memory, workspace)
        kept = cpu.energy(selection.values)
        *ask, gather = self.rounds(accumulated.numel, dtype, group)
        if ask:
            ask[0].send = np.array([selection.indices.size], _COUNT)
            ask[0].recv = workspace.array("counts", group.size, _COUNT)
            counts = yield ask[0]
            gather.counts = [message_bytes(int(count), accumulated.numel, dtype, _WIRE) for count in counts]
        message = workspace.array("message", gather.counts[group.rank], _BYTE)
        write_message(message, selection, accumulated.numel, _WIRE, flags_of(accumulated), accumulated.energy, kept)
        gather.send = message
        gather.recv = workspace.array("messages", sum(gather.counts), _BYTE)
        received = yield gather

        mean = workspace.array("mean", accumulated.numel, dtype)
        mean[:] = 0
        flags, selected, energy, lost = 0, 0, 0.0, 0.0
        start = 0
        for rank, size in enumerate(gather.counts):
            sparse = read_message(received[start : start + size], accumulated.numel, dtype, workspace)
            start += size
            if not cpu.scatter_add(sparse.selection.indices, sparse.selection.values, 1 / group.size, mean):
                raise MessageError(f"allgather: an index from rank {rank} is not below {accumulated.numel}")
            flags |= sparse.flags
            selected += sparse.selection.indices.size
            energy += sparse.energy
            lost += sparse.lost
        return Result(
            mean=mean,
            sent=Selection(selection.indices, selection.values),
            gain=gain_of(lost, energy),
            kept=selected / group.size,
            nonfinite=bool(flags & NONFINITE),
            stale=bool(flags & STALE),
        )
