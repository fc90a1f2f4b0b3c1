"""Pairs of ranks exchange all they have, then pairs of pairs, until all ranks have the sum."""

from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.regions import SegmentedMean
from mpicomp.collectives.scheme import Exchange, Memory, Scheme
from mpicomp.compressors.accumulated import TRAILER, Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.registry import register
from mpicomp.rounds import Group, Round


@register
class RecursiveDoubling(Scheme[Dense]):
    """Exchanges of the whole array with ranks at distances 1, 2, 4 ...

    The fewest steps possible, with the whole array in each: it suits short arrays. If the number of ranks is no power
    of two, those beyond the largest one give their arrays to partners first and get the mean at the end.

    All ranks hold the same bits: the two sums of an exchange have the same two terms, and both sides of each
    term's group held the same bits before.

    16-bit wires are refused: they would round at every step.
    """

    id: ClassVar[str] = "recursive-doubling"
    precedence: ClassVar[int] = 9
    paper: ClassVar[str] = (
        "Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521; segments summed as they arrive"
    )
    messages: ClassVar[str] = "dense"
    overwrites: ClassVar[bool] = True

    @classmethod
    def supports(cls, compressor: type[Compressor] | Compressor) -> bool:
        return super().supports(compressor) and getattr(compressor, "wire", None) is None

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        whole = numel + TRAILER
        return [
            Round("sendrecv", tuple(0 if peer is None else whole for peer in peers), dtype, peers=peers)
            for peers in _peers(group)
        ]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        return Memory((numel + TRAILER) * dtype.itemsize, 0)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, whole, dtype = context.group, accumulated.numel + TRAILER, accumulated.dtype
        workspace = context.workspace
        segments = SegmentedMean(accumulated, group.size)
        tasks = self.rounds(accumulated.numel, dtype, group)
        mine = accumulated.with_trailer()
        overwrites = accumulated.may_be_overwritten
        # Sums are made in two arrays in turn. The one that is returned may be this rank's own, which was sent by then.
        mean = mine if overwrites else workspace.array("mean", whole, dtype)
        other = workspace.scratch("incoming", whole, dtype)
        beyond = group.rank >= _power_of_two(group.size)
        last = len(tasks) - 1 - (group.size > _power_of_two(group.size))
        total = mine
        if not tasks:
            mean[:] = mine
            segments.divide(mean, 0, whole)
        for place, task in enumerate(tasks):
            received = mean if total is other else other
            task.send, task.recv = total[: task.counts[0]], received[: task.counts[1]]
            if beyond:
                task.arrived = segments.sees(received, 0)
            else:
                task.arrived = segments.adds(received, received, 0, partial(_cut, total), complete=place == last)
            yield task
            if task.peers[1] is not None:
                total = received
        if total is other:
            mean[:] = other
        return segments.result(mean)


def _cut(array: NDArray[np.floating], start: int, stop: int) -> NDArray[np.floating]:
    return array[start:stop]


def _power_of_two(size: int) -> int:
    """Return the largest power of two that is not above a size."""
    return 1 << (size.bit_length() - 1)


def _peers(group: Group) -> list[tuple[int | None, int | None]]:
    """Return whom this rank sends to and receives from in every step."""
    core = _power_of_two(group.size)
    rank, beyond = group.rank, group.size - core
    if rank >= core:
        partner = rank - core
        return [(partner, None), *[(None, None)] * (core.bit_length() - 1), (None, partner)]
    doubling: list[tuple[int | None, int | None]] = [
        (rank ^ distance, rank ^ distance) for distance in (1 << bit for bit in range(core.bit_length() - 1))
    ]
    if beyond == 0:
        return doubling
    partner_beyond = rank + core if rank < beyond else None
    return [(None, partner_beyond), *doubling, (partner_beyond, None)]
