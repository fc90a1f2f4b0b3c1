"""A collective in one file: halves of the array are summed pair by pair, and the means come back the same way."""

from typing import Any, ClassVar

import numpy as np

import mpicomp
from mpicomp.collectives import Context, Exchange, Result, Scheme, gain_of, is_finite
from mpicomp.compressors import Accumulated
from mpicomp.compressors.accumulated import TRAILER
from mpicomp.mpi.rounds import Group, Round

Move = tuple[tuple[int | None, int | None], slice, slice]  # to whom and from whom, and which part of the array


@mpicomp.register
class HalvingDoubling(Scheme[mpicomp.Dense]):
    """Recursive halving to sum, recursive doubling to share: few steps, and as few bytes as a ring.

    Of a number of ranks that is no power of two, those beyond give their arrays to partners and get the mean from them.
    """

    id: ClassVar[str] = "halving-doubling"
    paper: ClassVar[str] = "Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521"
    messages: ClassVar[str] = "dense"

    @classmethod
    def supports(cls, compressor: type[mpicomp.Compressor] | mpicomp.Compressor) -> bool:
        """Carry full numbers only: 16-bit ones would be rounded at every step."""
        return super().supports(compressor) and getattr(compressor, "wire", None) is None

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Return the shapes of what `exchange` yields, which follow from the number of elements and of ranks."""
        return [
            Round("sendrecv", (out.stop - out.start, into.stop - into.start), dtype, peers=peers)
            for peers, out, into in _moves(numel + TRAILER, group)
        ]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Sum parts, divide the part that is kept, and pass means on."""
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        total = context.workspace.array("total", numel + TRAILER, dtype)
        # Four numbers travel behind the array, in the same sum: what all ranks have to know of each other's.
        total[:] = accumulated.with_trailer(
            not accumulated.finite, accumulated.stale, accumulated.energy, accumulated.lost
        )
        moves, tasks = _moves(numel + TRAILER, group), self.rounds(numel, dtype, group)
        for place, ((_, out, into), task) in enumerate(zip(moves, tasks, strict=True)):
            task.send = total[out]
            task.recv = context.workspace.array("part", task.counts[1], dtype)
            received = yield task
            if place < len(moves) // 2:
                with np.errstate(over="ignore", invalid="ignore"):
                    total[into] += received
            else:
                total[into] = received
            if place + 1 == len(moves) // 2:  # `into` is summed over all ranks
                total[into.start : min(into.stop, numel)] /= group.size

        mean = total[:numel]
        nonfinite, stale, energy, lost = (float(number) for number in total[numel:])
        return Result(
            mean=mean,
            sent=accumulated.array(),
            energy=energy,
            gain=gain_of(lost, energy),
            kept=float(numel),
            nonfinite=nonfinite > 0 or not is_finite(mean, energy, group.size),
            stale=stale > 0,
        )


def _moves(whole: int, group: Group) -> list[Move]:
    """Return what this rank sends and receives in every step; sums are made in the first half of them."""
    rank, core = group.rank, 1 << (group.size.bit_length() - 1)  # the largest power of two
    everything, nothing = slice(0, whole), slice(0, 0)
    idle: Move = ((None, None), nothing, nothing)
    halving: list[Move] = []
    kept = everything
    for distance in (core >> bit for bit in range(1, core.bit_length())):
        middle = (kept.start + kept.stop) // 2
        low, high = slice(kept.start, middle), slice(middle, kept.stop)
        kept, sent = (high, low) if rank & distance else (low, high)
        halving.append(((rank ^ distance, rank ^ distance), sent, kept))
    doubling: list[Move] = [(peers, kept, sent) for peers, sent, kept in reversed(halving)]
    if core == group.size:
        return halving + doubling
    if rank >= core:
        waiting = [idle] * (2 * len(halving))
        return [((rank - core, None), everything, nothing), *waiting, ((None, rank - core), nothing, everything)]
    first, last = idle, idle
    if rank + core < group.size:
        first, last = ((None, rank + core), nothing, everything), ((rank + core, None), everything, nothing)
    return [first, *halving, *doubling, last]
