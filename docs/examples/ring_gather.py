"""A collective in one file: sparse messages of all ranks go around a ring."""

from typing import Any, ClassVar

import numpy as np

import mpicomp
from mpicomp.collectives import Context, Exchange, Result, Scheme
from mpicomp.collectives.allgather import MessageLayout
from mpicomp.collectives.scheme import COUNT, failed_result, gather_counts
from mpicomp.compressors import Accumulated
from mpicomp.compressors.wire import STALE
from mpicomp.errors import MessageError
from mpicomp.mpi.rounds import Group, Round


@mpicomp.register
class RingGather(Scheme[mpicomp.Sparsifier]):
    """Each rank passes on to the next one the message that it received in the step before."""

    id: ClassVar[str] = "ring-gather"
    paper: ClassVar[str] = "Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521"
    messages: ClassVar[str] = "sparse"
    needs_whole_message: ClassVar[bool] = True  # it carries any wire, since it cuts no message

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Return the shapes of what `exchange` yields, with the expected size of a message."""
        size = self.compressor.message_bytes(self.compressor.expected(numel), numel, dtype)
        counts = [] if self.compressor.count(numel) is not None else [Round("allgatherv", [1] * group.size, COUNT)]
        return counts + _ring([size] * group.size, group)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Select, pass messages on, and decode all of them in the order of ranks."""
        group, selection = context.group, self.compressor.select(accumulated, context)
        counts = [selection.indices.size] * group.size
        if self.compressor.count(accumulated.numel) is None:
            counts = yield from gather_counts(self.id, counts[group.rank], accumulated.numel, context)
        layout = MessageLayout(self.compressor, counts, accumulated, context)
        layout.write(selection, STALE * accumulated.stale, accumulated.device_moments)
        parts = [layout.received[start:stop] for start, stop in layout.bounds]
        parts[group.rank][:] = layout.message
        for step, task in enumerate(_ring(layout.task.counts, group)):
            task.send, task.recv = (parts[(group.rank - step - back) % group.size] for back in (0, 1))
            yield task
        try:
            flags, energy, lost, mean = layout.read(layout.received)
        except MessageError as error:  # this rank's alone: the others learn of it from its next message
            return failed_result(accumulated, error, stale=False)
        return Result.from_headers(mean, selection, layout.kept, flags, energy, lost)


def _ring(sizes: Any, group: Group) -> list[Round]:
    size, rank = group.size, group.rank
    pairs = [(sizes[(rank - step) % size], sizes[(rank - step - 1) % size]) for step in range(size - 1)]
    peers = (rank + 1) % size, (rank - 1) % size
    return [Round("sendrecv", pair, np.dtype(np.uint8), peers=peers) for pair in pairs]
