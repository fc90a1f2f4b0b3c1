"""Every rank owns a part of the array, counts the votes of all ranks there, and tells what has won."""

import math
from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.dense_message import HEADER_BYTES, write_header
from mpicomp.collectives.owners import read_answers, read_sent
from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme, flags_of, undelivered
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.message import NONFINITE, STALE
from mpicomp.compressors.signsgd import SignSGD
from mpicomp.kernels import cpu
from mpicomp.rounds import Group, Round, parts_of

_BYTE, _WORD = np.dtype(np.uint8), np.dtype(np.uint64)
_SIGNS = 64  # in a word


class MajorityVote(Scheme[SignSGD]):
    """Alltoallv of signs, a count by each part's owner, Allgatherv of the signs that have won.

    About two bits an element leave a rank, whatever the number of ranks. What all ranks are delivered is each one's
    share of it; the gain is not told, for which magnitudes would have to travel.
    """

    id: ClassVar[str] = "majority-vote"
    paper: ClassVar[str] = (
        "majority vote, Bernstein et al. 2018, arXiv 1810.05291; counted by an owner for each part in place of a "
        "server, as in 1-bit Adam's exchange"
    )
    messages: ClassVar[str] = "votes"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """One alltoallv and one allgatherv of bytes; see `Scheme.rounds`."""
        parts = parts_of(-(-numel // _SIGNS), group.size)
        counts = [HEADER_BYTES + count * _WORD.itemsize for count in parts]
        return [Round(operation, counts, _BYTE) for operation in ("alltoallv", "allgatherv")]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Pack, scatter, count, gather; see `Scheme.exchange`."""
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        workspace = context.workspace
        scatter, gather = self.rounds(numel, dtype, group)
        places = np.concatenate(([0], np.cumsum(scatter.counts)))
        parts = parts_of(-(-numel // _SIGNS), group.size)
        bounds = np.concatenate(([0], np.cumsum(parts)))

        signs = workspace.array("signs", bounds[-1], _WORD)
        cpu.pack_votes(accumulated.array(), signs)
        outgoing = workspace.array("outgoing", places[-1], _BYTE)
        for rank in range(group.size):
            message = outgoing[places[rank] : places[rank + 1]]
            write_header(message, parts[rank], flags_of(accumulated), accumulated.energy, 0.0)
            message[HEADER_BYTES:].view(_WORD)[:] = signs[bounds[rank] : bounds[rank + 1]]
        size = scatter.counts[group.rank]
        scatter.send = outgoing
        scatter.recv = workspace.array("incoming", size * group.size, _BYTE)
        incoming = (yield scatter).reshape(group.size, size)

        flags, energy, _, problem = read_sent(self.id, incoming, parts[group.rank])
        reply = workspace.array("reply", size, _BYTE)
        cpu.majority(incoming[:, HEADER_BYTES:].view(_WORD), reply[HEADER_BYTES:].view(_WORD))
        write_header(reply, parts[group.rank], flags, energy, 0.0)
        gather.send = reply
        gather.recv = workspace.array("replies", places[-1], _BYTE)
        replies = yield gather

        flags, energy, _, problem = read_answers(self.id, replies, scatter.counts, parts, problem)
        if problem is not None:
            return undelivered(accumulated, problem, stale=False)
        for rank in range(group.size):
            message = replies[places[rank] : places[rank + 1]]
            signs[bounds[rank] : bounds[rank + 1]] = message[HEADER_BYTES:].view(_WORD)
        mean = workspace.array("mean", numel, dtype)
        cpu.unpack_votes(signs, self.compressor.scale, mean)
        return Result(
            mean=mean,
            sent=mean,
            energy=energy,
            gain=math.nan,
            kept=float(numel),
            nonfinite=bool(flags & NONFINITE),
            stale=bool(flags & STALE),
        )
