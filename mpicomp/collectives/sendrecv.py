"""Dense sums by messages between two ranks, whose segments are summed as they arrive."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, Memory, Result, Scheme, slices_of
from mpicomp.compressors.accumulated import TRAILER, Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.gpu import to_python
from mpicomp.mpi.rounds import Group, Pending, Round, parts_of
from mpicomp.registry import register

HALF_BYTES = 1 << 20
"""Bytes of half a part from which on the halves travel apart: two segments of a transport's, so that some follow."""


@register
class Ring(Scheme[Dense]):
    """Reduce-scatter and allgather in ``ranks - 1`` steps each, a part of one rank's share at a time.

    The fewest bytes, in many steps: it suits long arrays. Sums are made of segments as they arrive, so that only
    the last segment's is waited for, and the rank that completes a part divides it before it goes round. Each
    part is summed in ring order from another rank on, once, so all ranks hold the same bits.

    Long parts travel in two halves: while one ends its step the other one is under way, so that the link is not idle
    until the next step begins, and a rank that is late by less than a half makes no rank wait. They begin when the
    first half is accumulated; the numbers behind the array, not known before the rest is, are gathered while the means
    go round.

    Where the array may be overwritten, the mean is made in it, and only a part that arrives needs memory. 16-bit wires
    are refused: they would round at every step.
    """

    id: ClassVar[str] = "ring"
    precedence: ClassVar[int] = 8
    paper: ClassVar[str] = "Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; segments summed as they arrive"
    messages: ClassVar[str] = "dense"
    sums_on_the_way: ClassVar[bool] = True
    overwrites: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        # Equal shapes are one object: of thousands of ranks there are some ten thousand.
        size, rank = group.size, group.rank
        halved = _halved(numel, dtype, size)
        neighbours = ((rank + 1) % size, (rank - 1) % size)
        lengths = _lengths(numel, halved, size)
        turns = [*lengths[rank::-1], *lengths[:rank:-1]]  # in which a rank sends its parts
        turns = (2 * turns)[: 2 * size - 1]
        known: dict[Any, list[Round]] = {}
        tasks: list[Round] = []
        for turn in pairwise(turns):
            if turn not in known:
                known[turn] = [
                    Round("sendrecv", counts, dtype, peers=neighbours, background=halved)
                    for counts in zip(*turn, strict=True)
                ]
            tasks += known[turn]
        if halved:
            # The last sum is made by then, and there is something left behind which it can travel unnoticed.
            tasks.insert(len(tasks) // 2 + 1, Round("allgatherv", [TRAILER] * size, dtype, background=True))
        return tasks

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        size = group.size
        longest = max(map(max, _lengths(numel, _halved(numel, dtype, size), size)))
        elements = (1 + _halved(numel, dtype, size)) * longest if size > 1 else 0
        return Memory((elements + TRAILER * size) * dtype.itemsize, 0)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        size, workspace = group.size, context.workspace
        segments = SegmentedMean(accumulated, size)
        mean = accumulated.memory_of_mean(workspace)
        halved = _halved(numel, dtype, size)
        tails = workspace.scratch("tails", size * TRAILER if halved else 0, dtype)
        if not halved:
            accumulated.with_trailer()
        if size == 1:
            mean[:] = accumulated.with_trailer()
            segments.divide(mean, 0, numel)
        turns = 1 + halved  # exchanges of a step, and of those under way
        longest = max(map(max, _lengths(numel, halved, size)))
        incoming = workspace.scratch("incoming", turns * longest if size > 1 else 0, dtype).reshape(turns, -1)
        spans = iter(_spans(numel, halved, group))
        under_way: deque[Pending] = deque()
        begun = 0
        for shape in self.rounds(numel, dtype, group):
            task = replace(shape)  # others may be the same object
            if len(under_way) == 2:
                yield under_way.popleft()
            if task.operation == "allgatherv":
                task.send, task.recv = accumulated.with_trailer()[numel:], tails
                pending_tails = yield task
                continue
            out, into = next(spans)
            place, turn, begun = begun // turns, begun % turns, begun + 1
            task.send = accumulated.part(out.start, out.stop) if place == 0 else mean[out]
            if place < size - 1:
                task.recv = received = incoming[turn, : into.stop - into.start]
                task.arrived = segments.add(received, mean, into.start, accumulated.part, complete=place == size - 2)
            else:
                task.recv, task.arrived = mean[into], segments.check_finite(mean, into.start)
            reply = yield task
            if halved:
                under_way.append(reply)
        if halved:
            while under_way:
                yield under_way.popleft()
            yield pending_tails
            with np.errstate(over="ignore", invalid="ignore"):
                mean[numel:] = tails.reshape(size, TRAILER).sum(axis=0)
        return segments.result(mean)


def _halved(numel: int, dtype: np.dtype[Any], size: int) -> bool:
    return size > 1 and numel * dtype.itemsize >= 2 * HALF_BYTES * size


def _lengths(numel: int, halved: bool, size: int) -> list[tuple[int, ...]]:
    parts = parts_of(numel if halved else numel + TRAILER, size)
    known = {part: tuple(parts_of(part, 2)) if halved else (part,) for part in set(parts)}
    return [known[part] for part in parts]


def _spans(numel: int, halved: bool, group: Group) -> list[tuple[slice, slice]]:
    """Return the spans that a rank sends and receives, exchange by exchange; it forwards those received."""
    size, lengths = group.size, _lengths(numel, halved, group.size)
    spans = iter(slices_of([length for part in lengths for length in part]))
    pieces = [[next(spans) for _ in part] for part in lengths]
    return [
        span
        for place in range(2 * (size - 1))
        for span in zip(pieces[(group.rank - place) % size], pieces[(group.rank - place - 1) % size], strict=True)
    ]


@register
class RecursiveDoubling(Scheme[Dense]):
    """Exchanges of the whole array with ranks at distances 1, 2, 4 ...

    The fewest steps possible, with the whole array in each: it suits short arrays. If the number of ranks is no power
    of two, those beyond the largest one give their arrays to partners first and get the mean at the end.

    All ranks hold the same bits: the two sums of an exchange have the same two terms, and both sides of each
    term's group held the same bits before. 16-bit wires are refused: they would round at every step.
    """

    id: ClassVar[str] = "recursive-doubling"
    precedence: ClassVar[int] = 9
    paper: ClassVar[str] = (
        "Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521; segments summed as they arrive"
    )
    messages: ClassVar[str] = "dense"
    sums_on_the_way: ClassVar[bool] = True
    overwrites: ClassVar[bool] = True

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
        # Sums are made in two arrays in turn. The one that is returned may be this rank's own, which was sent by then.
        mean = accumulated.memory_of_mean(workspace)
        other = workspace.scratch("incoming", whole, dtype)
        core = 1 << (group.size.bit_length() - 1)
        last = len(tasks) - 1 - (group.size > core)
        total = mine
        if not tasks:
            mean[:] = mine
            segments.divide(mean, 0, whole)
        for place, task in enumerate(tasks):
            received = mean if total is other else other
            task.send, task.recv = total[: task.counts[0]], received[: task.counts[1]]
            if group.rank >= core:
                task.arrived = segments.check_finite(received, 0)
            else:
                task.arrived = segments.add(received, received, 0, partial(_part, total), complete=place == last)
            yield task
            if task.peers[1] is not None:
                total = received
        if total is other:
            mean[:] = other
        return segments.result(mean)


def _part(array: NDArray[np.floating], start: int, stop: int) -> NDArray[np.floating]:
    return array[start:stop]


def _peers(group: Group) -> list[tuple[int | None, int | None]]:
    """Return the ranks that this rank sends to and receives from, in every step."""
    core = 1 << (group.size.bit_length() - 1)  # the largest power of two that is not above
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


class SegmentedMean:
    """Adds and divides segments as they arrive, and notes whether they are finite; trailers are summed alone."""

    def __init__(self, accumulated: Accumulated, ranks: int) -> None:
        self._accumulated, self._ranks, self._finite = accumulated, ranks, True  # finite is 0-d on a device

    def add(
        self,
        received: NDArray[np.floating],
        array: NDArray[np.floating],
        offset: int,
        other: Callable[[int, int], NDArray[np.floating]],
        complete: bool,
    ) -> Callable[[int, int], None]:
        """Return a function that writes segments received, plus others, to ``array``, and divides complete sums."""

        def arrived(start: int, stop: int) -> None:
            out = array[offset + start : offset + stop]
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(received[start:stop], other(offset + start, offset + stop), out=out)
            if complete:
                self.divide(array, offset + start, offset + stop)

        return arrived

    def check_finite(self, array: NDArray[np.floating], offset: int) -> Callable[[int, int], None]:
        """Return a function that checks whether segments of ``array``, which are means already, are finite."""

        def arrived(start: int, stop: int) -> None:
            values = array[offset + start : min(offset + stop, self._accumulated.numel)]
            # Squares of finite numbers overflow too, and are then not worth a fast answer.
            quick = isinstance(values, np.ndarray) and bool(np.isfinite(kernels.energy(values)))
            self._finite = self._finite & (quick or np.isfinite(values).all())

        return arrived

    def divide(self, array: NDArray[np.floating], start: int, stop: int) -> None:
        """Make sums means in place, but for the trailer."""
        values = array[start : min(stop, self._accumulated.numel)]
        self._finite = self._finite & kernels.scale(values, 1 / self._ranks)

    def result(self, array: NDArray[np.floating]) -> Result:
        """Return the result, once all segments of ``array`` were divided or seen."""
        numel = self._accumulated.numel
        [finite] = to_python(self._finite)
        return Result.from_trailer(self._accumulated, array[:numel], array[numel:], self._ranks, finite)
