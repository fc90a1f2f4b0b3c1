"""Every rank passes parts on to its right neighbour: first their sums grow, then the means go round."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.scheme import Exchange, Scheme
from mpicomp.collectives.segmented_mean import SegmentedMean
from mpicomp.compressors.accumulated import TAIL, Accumulated
from mpicomp.compressors.base import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.registry import register
from mpicomp.rounds import Group, Round, parts_of


@register
class Ring(Scheme[Dense]):
    """Reduce-scatter and allgather in ``ranks - 1`` steps each, a part of one rank's share at a time.

    As few bytes as can be, in many steps: it suits long arrays. Sums are made of segments as they arrive, so that only
    the last segment's is waited for, and the rank that completes a part divides it before it goes round. Each
    part is summed in ring order from another rank on, once, so all ranks hold the same bits.

    16-bit wires are refused: they would round at every step.
    """

    id: ClassVar[str] = "ring"
    precedence: ClassVar[int] = 8
    paper: ClassVar[str] = "Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; segments summed as they arrive"
    messages: ClassVar[str] = "dense"

    @classmethod
    def carries(cls, compressor: type[Compressor] | Compressor) -> bool:
        """Carry full numbers only; see `Scheme.carries`."""
        return super().carries(compressor) and getattr(compressor, "wire", None) is None

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Return ``2 (ranks - 1)`` exchanges with the neighbours; see `Scheme.rounds`."""
        size, rank = group.size, group.rank
        parts = parts_of(numel + TAIL, size)
        neighbours = ((rank + 1) % size, (rank - 1) % size)
        return [
            Round("sendrecv", (parts[(first - turn) % size], parts[(first - turn - 1) % size]), dtype, peers=neighbours)
            for first in (rank, rank + 1)
            for turn in range(size - 1)
        ]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Sum on the way round, divide, pass round; see `Scheme.exchange`."""
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        size, rank = group.size, group.rank
        segments = SegmentedMean(accumulated, size)
        mean = context.workspace.array("mean", numel + TAIL, dtype)
        parts = parts_of(numel + TAIL, size)
        bounds = np.concatenate(([0], np.cumsum(parts)))
        if size == 1:
            mean[:] = segments.own
            segments.divide(mean, 0, numel)
        source = segments.own
        for place, task in enumerate(self.rounds(numel, dtype, group)):
            growing = place < size - 1
            first, turn = (rank, place) if growing else (rank + 1, place - (size - 1))
            out, into = (first - turn) % size, (first - turn - 1) % size
            task.send = source[bounds[out] : bounds[out + 1]]
            task.recv = mean[bounds[into] : bounds[into + 1]]
            if growing:
                task.arrived = segments.adds(mean, bounds[into], segments.own, complete=turn == size - 2)
            else:
                task.arrived = segments.sees(mean, bounds[into])
            yield task
            source = mean
        return segments.result(mean)
