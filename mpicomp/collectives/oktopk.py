"""Ok-Topk: a sparse reduce-scatter over regions of equal load, then an allgather of the largest sums."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import (
    Exchange,
    Memory,
    Result,
    Scheme,
    check_counts,
    check_undamaged,
    failed_result,
    mean_at,
    slices_of,
)
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire import (
    DAMAGED,
    NONFINITE,
    STALE,
    Selection,
    Sparse,
    read_sparse,
    write_damaged,
    write_sparse,
)
from mpicomp.errors import MessageError
from mpicomp.gpu import HOST, Device, current_device
from mpicomp.mpi.rounds import Group, Round, Rounds, gather_rows, parts_of
from mpicomp.registry import register
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)
_COUNT = np.dtype(np.int64)
_ENERGY = np.dtype(np.float64)

# As in the paper.
_RENEW_REGIONS = 64  # exchanges of a bucket after which regions are balanced again
_RENEW_THRESHOLD = 32  # exchanges of a bucket after which the threshold is found again
_ADJUST = 1.008  # factor by which the threshold changes in between

_COPIES = 5  # of the elements that travel, at most
_RESULTS = ("sent", "sent.rounded", "delivered.all")  # selections that are needed after the exchange
_WORTH_BYTES = 1 << 14  # by which sharing out has to shorten the longest message: about two rounds' latency

_Span = tuple[int, int]  # start and end of a part of the array


@register
class Oktopk(Scheme[Sparsifier]):
    """Each rank owns a region, sums all ranks' selections there, and hands on the largest of all sums.

    1. Alltoallv of counts, then of messages: the selected elements of region j go to rank j, which adds them.
    2. Allgatherv of the number of each owner's sums that reach a threshold in magnitude, the same for all ranks.
    3. Allgatherv of messages with these sums. If an owner has more than twice the mean number of them, and it is
       worth a round, an alltoallv shares them out evenly before.

    The threshold is the k-th largest magnitude of all sums, k being the mean number of selected elements. It is found,
    from an allgatherv of all magnitudes, at every 32nd exchange of a bucket and wherever more than 2k or fewer than k/2
    sums reach the one before. In between it changes by 0.8 % where the number of sums that reach it has left
    2k/3 .. 4k/3.

    Regions have the same length at first. At every 64th exchange ranks send the quantiles of their selections with
    round 2; the means are the boundaries from the next exchange on. The bucket's memory keeps boundaries and threshold.

    A rank has sent its values at those of its indices that were delivered; the others stay in its residual. 16-bit
    values are rounded at the sender and, as means, at the owner, whose residual keeps that error, times the number of
    ranks. One more allgatherv of one number a rank then sums the lost energy.

    Selections of a GPU are exchanged in host memory: merges of a few elements ask for numbers all the time.
    """

    id: ClassVar[str] = "oktopk"
    precedence: ClassVar[int] = 7
    paper: ClassVar[str] = (
        "Ok-Topk, Li and Hoefler 2022, arXiv 2201.07598; the compressor selects locally, indices are integers, "
        "boundaries serve from the next step on, the threshold is found again too where it is off by a factor of 2, "
        "sums are shared out where that is worth a round"
    )
    messages: ClassVar[str] = "sparse"
    may_drop_selected = True
    by_value = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        size = group.size
        parts = list(zip(parts_of(self.compressor.expected(numel), size), parts_of(numel, size), strict=True))
        bytes_of = self.compressor.message_bytes
        known = {part: bytes_of(*part, dtype) for part in set(parts)}  # of thousands of ranks, few differ
        sizes = [known[part] for part in parts]
        return [
            Round("alltoallv", [2] * size, _COUNT),
            Round("alltoallv", sizes, _BYTE),
            Round("allgatherv", [2] * size, _COUNT),
            Round("allgatherv", sizes, _BYTE),
            *([] if self.compressor.wire is None else [Round("allgatherv", [1] * size, _ENERGY)]),
        ]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        selection = self.selection_memory(numel, dtype)
        merged = _COPIES * self.buffer_bytes(numel, dtype, group)  # messages, their elements, sums by halves
        return Memory(selection.scratch + merged, 2 * selection.held)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        return (yield from _Step(self.compressor, accumulated, context).run())


class _Step:
    """One exchange on one rank."""

    def __init__(self, compressor: Sparsifier, accumulated: Accumulated, context: Context) -> None:
        self.compressor = compressor
        self.accumulated = accumulated
        self.context = context
        self.group = context.group
        self.device: Device = current_device()
        self.workspace: Workspace = context.workspace
        if self.device is not HOST:
            self.workspace = context.workspace.made("oktopk on the host", Workspace)
        self.numel = accumulated.numel
        self.dtype = accumulated.dtype
        state = context.memory.get("oktopk")
        if state is None or (state["numel"], state["ranks"]) != (self.numel, self.group.size):
            bounds = list(accumulate(parts_of(self.numel, self.group.size), initial=0))  # regions of the same length
            state = {"numel": self.numel, "ranks": self.group.size, "exchanges": 0, "bounds": bounds, "threshold": None}
        self.state = dict(state)
        self.flags = NONFINITE * (not accumulated.finite) | STALE * accumulated.stale
        self.problem: MessageError | None = None

    def run(self) -> Exchange:
        wire, ranks = self.compressor.wire, self.group.size
        selection = self.compressor.select(self.accumulated, self.context)
        if self.device is not HOST:
            selection = Selection(*self.device.to_host_all([selection.indices, selection.values]))
        elif wire is not None and np.may_share_memory(selection.values, self.accumulated.array()):
            selection = Selection(selection.indices, selection.values.copy())  # rounded in place when it is written
        regions = list(pairwise(self.state["bounds"]))

        target, arrived = yield from self._scatter(selection, regions)
        sums = self._sum([message.selection for message in arrived])
        kernels.scale(sums.values, 1 / ranks)
        counts, threshold, num_chosen = yield from self._agree(sums, selection, target)
        chosen = _split(sums, threshold, num_chosen, self.workspace, "sums")
        energy, kept = self._energies(arrived, chosen) if wire is None else (0.0, 0.0)
        error = None if wire is None else self._round_means(chosen, wire)
        chosen.indices += np.uint32(regions[self.group.rank][0])

        even, spans, held = parts_of(sum(counts), ranks), regions, chosen
        shorter = self._bytes(max(counts), (0, self.numel)) - self._bytes(even[0], (0, self.numel))
        if max(counts) * ranks > 2 * sum(counts) and shorter > _WORTH_BYTES:
            held = yield from self._share_out(chosen, counts, even)
            counts, spans = even, [(0, self.numel)] * ranks
        before = self.problem
        delivered, owners_lost = yield from self._gather(held, counts, spans, energy, kept)
        check_undamaged("oktopk", self.flags, before)

        sent = _intersection(selection, delivered.indices, self.workspace, "sent")
        lost = sum(message.lost for message in arrived) + owners_lost
        if error is not None:
            error_sent = Selection(chosen.indices, error)
            sent = _merged(kernels.merge_subtract, sent, error_sent, self.workspace, "sent.rounded")
            array, places = self.accumulated.array(), sent.indices
            if self.device is not HOST:
                array = self.device.to_host(array[self.device.to_device(places)])
                places = np.arange(places.size, dtype=np.uint32)
            change = kernels.norm_change(array, places, sent.values)
            lost = max(0.0, self.accumulated.energy + change) if self.problem is None else math.nan
            lost = float((yield from gather_rows(np.array(lost), self.group)).sum())
            check_undamaged("oktopk", DAMAGED * math.isnan(lost), self.problem)
        self.state["exchanges"] += 1
        self.context.memory["oktopk"] = self.state

        if self.problem is not None:
            return failed_result(self.accumulated, self.problem, stale=False)
        # Sums can be infinite where no rank's value is; they reach every threshold.
        infinite = kernels.count_reaching(delivered.values, kernels.magnitude_bits(np.inf, self.dtype))
        total = sum(message.energy for message in arrived)
        kept = float(delivered.indices.size)
        delivered, sent = (
            Selection(self.device.to_device(found.indices), self.device.to_device(found.values))
            for found in (delivered, sent)
        )
        mean = mean_at(delivered.indices, delivered.values)
        return Result.from_headers(mean, sent, kept, self.flags, total, lost, infinite == 0)

    def _scatter(self, selection: Selection, regions: Sequence[_Span]) -> Rounds[tuple[int, list[Sparse]]]:
        """Send every region's elements to its owner; return k and the messages received, one a rank."""
        ranks = self.group.size
        inner = np.array([start for start, _ in regions[1:]], np.uint32)
        cuts = [0, *np.searchsorted(selection.indices, inner).tolist(), selection.indices.size]
        counts = [stop - start for start, stop in pairwise(cuts)]
        ask = Round("alltoallv", [2] * ranks, _COUNT)
        ask.send = np.array([(count, selection.indices.size) for count in counts], _COUNT).reshape(-1)
        ask.recv = self.workspace.host_array("counts", 2 * ranks, _COUNT)
        answers = (yield ask).reshape(ranks, 2)
        kept_region = regions[self.group.rank]
        coming = self._within(answers[:, 0], kept_region[1] - kept_region[0])
        selected = sum(self._within(answers[:, 1], self.numel))
        target = max(min(selected, 1), (2 * selected + ranks) // (2 * ranks))  # at least 1 where there is any

        sizes = [self._bytes(count, region) for count, region in zip(counts, regions, strict=True)]
        outgoing = self.workspace.scratch("outgoing", sum(sizes), _BYTE)
        kept = kernels.energy(selection.values)
        for part, region, out in zip(pairwise(cuts), regions, _cut(outgoing, sizes), strict=True):
            span = slice(*part)
            piece = Selection(selection.indices[span], selection.values[span])
            self._write(piece, region, out, self.accumulated.energy, kept)
        received = [self._bytes(count, kept_region) for count in coming]
        scatter = Round("alltoallv", sizes, _BYTE, send=outgoing, received=received)
        scatter.recv = self.workspace.scratch("incoming", sum(received), _BYTE)
        incoming = yield scatter
        return target, self._read(incoming, received, coming, [(0, kept_region[1] - kept_region[0])] * ranks, "arrived")

    def _within(self, counts: NDArray[np.int64], most: int) -> list[int]:
        # A wrong count is clipped: the others do not know of it, so this rank takes part to the end.
        found = [int(count) for count in counts]
        for rank, count in enumerate(found):
            if not 0 <= count <= most:
                text = f"oktopk: from rank {rank}: a number of elements must be from 0 to {most}, got {count}"
                self.problem = self.problem or MessageError(text)
        return [min(max(count, 0), most) for count in found]

    def _sum(self, parts: list[Selection], name: str = "sum") -> Selection:
        if len(parts) == 1:
            return parts[0]
        half = len(parts) // 2
        first, second = self._sum(parts[:half], f"{name}.0"), self._sum(parts[half:], f"{name}.1")
        return _merged(kernels.merge_add, first, second, self.workspace, name)

    def _agree(self, sums: Selection, selection: Selection, target: int) -> Rounds[tuple[list[int], int, int]]:
        """Return the delivered sums of each owner, the magnitude bits that they reach, and this rank's number."""
        ranks, state = self.group.size, self.state
        bits = 0 if state["threshold"] is None else kernels.magnitude_bits(state["threshold"], self.dtype)
        reaching = 0 if state["threshold"] is None else kernels.count_reaching(sums.values, bits)
        renew = state["exchanges"] % _RENEW_REGIONS == 0
        counts_here = [reaching, sums.indices.size, *(_quantiles(selection.indices, ranks) if renew else ())]
        share = Round("allgatherv", [len(counts_here)] * ranks, _COUNT, send=np.array(counts_here, _COUNT))
        share.recv = self.workspace.host_array("counts", ranks * len(counts_here), _COUNT)
        answers = (yield share).reshape(ranks, len(counts_here))
        rank = self.group.rank
        found = check_counts("oktopk", answers[:, 1], 0, self.numel, (rank, counts_here[1]))
        most = 0 if state["threshold"] is None else max(found)
        counts = check_counts("oktopk", answers[:, 0], 0, most, (rank, counts_here[0]))
        if renew:
            cuts = answers[:, 2:]
            check_counts("oktopk", cuts.reshape(-1), -1, self.numel)
            state["bounds"] = sorted(_mean_bounds(cuts, state["bounds"]))

        reached, num_chosen = sum(counts), counts[rank]
        due = state["exchanges"] % _RENEW_THRESHOLD == 0
        if sum(found) > 0 and (due or reached > 2 * target or 2 * reached < target):
            gather = Round("allgatherv", found, self.dtype, send=sums.values)
            gather.recv = self.workspace.scratch("magnitudes", sum(found), self.dtype)
            magnitudes = yield gather
            bits = kernels.kth_magnitude(magnitudes, max(1, min(target, magnitudes.size)))
            threshold = kernels.magnitude_of(bits, self.dtype)
            state["threshold"] = threshold if math.isfinite(threshold) else None
            parts = _cut(magnitudes, found)
            *counts, num_chosen = (kernels.count_reaching(part, bits) for part in (*parts, sums.values))
            if num_chosen != counts[rank]:
                text = f"oktopk: of the {sums.values.size} sums of rank {rank} others were received than it has sent"
                self.problem = self.problem or MessageError(text)
        elif state["threshold"] is not None and 3 * reached > 4 * target:
            state["threshold"] *= _ADJUST
        elif state["threshold"] is not None and 3 * reached < 2 * target:
            state["threshold"] /= _ADJUST
        return counts, bits, num_chosen

    def _energies(self, arrived: Sequence[Sparse], chosen: Selection) -> tuple[float, float]:
        energy, kept = 0.0, 0.0
        for message in arrived:
            delivered = _intersection(message.selection, chosen.indices, self.workspace, "delivered")
            energy += kernels.energy(message.selection.values)
            kept += kernels.energy(delivered.values)
        return energy, kept

    def _round_means(self, chosen: Selection, wire: str) -> NDArray[np.floating]:
        """Round means to 16 bits, in place; return the rounding errors of their sums over ranks."""
        size = chosen.values.size
        rounded = self.workspace.scratch("rounded", size, self.dtype)
        error = self.workspace.scratch("error", size, self.dtype)
        kernels.narrow(chosen.values, wire, self.workspace.scratch("halves", size, np.uint16), rounded)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(chosen.values, rounded, out=error)
            np.multiply(error, self.dtype.type(self.group.size), out=error)
        chosen.values[:] = rounded
        return error

    def _share_out(self, chosen: Selection, counts: Sequence[int], even: Sequence[int]) -> Rounds[Selection]:
        """Move consecutive pieces of all ranks' elements so that each rank holds ``even`` of them; return its own."""
        ranks, rank, whole = self.group.size, self.group.rank, (0, self.numel)
        going = _overlaps(counts, even, rank)
        coming = [_overlaps(counts, even, source)[rank] for source in range(ranks)]
        sizes, received = ([self._bytes(count, whole) for count in pieces] for pieces in (going, coming))
        outgoing = self.workspace.scratch("pieces.out", sum(sizes), _BYTE)
        for span, out in zip(slices_of(going), _cut(outgoing, sizes), strict=True):
            self._write(Selection(chosen.indices[span], chosen.values[span]), whole, out, 0.0, 0.0)
        move = Round("alltoallv", sizes, _BYTE, send=outgoing, received=received)
        move.recv = self.workspace.scratch("pieces.in", sum(received), _BYTE)
        self._read((yield move), received, coming, [whole] * ranks, "pieces")
        return _capacity(self.workspace, "pieces", even[rank], self.dtype)

    def _gather(
        self, held: Selection, counts: Sequence[int], spans: Sequence[_Span], energy: float, kept: float
    ) -> Rounds[tuple[Selection, float]]:
        """Return all delivered means, in order, and the energy that owners lost."""
        sizes = [self._bytes(count, span) for count, span in zip(counts, spans, strict=True)]
        message = self.workspace.scratch("message", sizes[self.group.rank], _BYTE)
        self._write(held, spans[self.group.rank], message, energy, kept)
        gather = Round("allgatherv", sizes, _BYTE, send=message)
        gather.recv = self.workspace.scratch("messages", sum(sizes), _BYTE)
        messages = self._read((yield gather), sizes, counts, spans, "delivered.all")
        everything = _capacity(self.workspace, "delivered.all", sum(counts), self.dtype)
        return everything, sum(part.lost for part in messages)

    def _bytes(self, count: int, span: _Span) -> int:
        return self.compressor.message_bytes(count, span[1] - span[0], self.dtype)

    def _write(self, part: Selection, span: _Span, out: NDArray[np.uint8], energy: float, kept: float) -> None:
        if self.problem is not None or self.flags & DAMAGED:
            write_damaged(out)
            return
        length = span[1] - span[0]
        indices = self.workspace.scratch("relative", part.indices.size, np.uint32)
        np.subtract(part.indices, np.uint32(span[0]), out=indices)
        wire = self.compressor.wire_for(indices.size, length)
        write_sparse(out, Selection(indices, part.values), length, wire, self.flags, energy, kept)

    def _read(
        self,
        received: NDArray[np.uint8],
        sizes: Sequence[int],
        counts: Sequence[int],
        spans: Sequence[_Span],
        name: str,
    ) -> list[Sparse]:
        # One message of each rank, one behind the other into an array of the workspace.
        whole = _capacity(self.workspace, name, sum(counts), self.dtype)
        messages = []
        bounds = pairwise([0, *accumulate(counts)])
        for rank, (message, span, (start, stop)) in enumerate(zip(_cut(received, sizes), spans, bounds, strict=True)):
            try:
                sparse = read_sparse(message, span[1] - span[0], self.dtype, self.workspace, stop - start)
            except MessageError as error:
                self.problem = self.problem or MessageError(f"oktopk: from rank {rank}: {error}")
                sparse = Sparse(_capacity(self.workspace, name, 0, self.dtype), 0, 0.0, 0.0)
            self.flags |= sparse.flags
            if sparse.selection.indices.size < stop - start:  # damaged, and nothing of it will be delivered
                messages.append(sparse)
                continue
            part = Selection(whole.indices[start:stop], whole.values[start:stop])
            np.add(sparse.selection.indices, np.uint32(span[0]), out=part.indices)
            part.values[:] = sparse.selection.values
            messages.append(Sparse(part, sparse.flags, sparse.energy, sparse.lost))
        return messages


def _cut(array: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
    return [array[span] for span in slices_of(sizes)]


def _capacity(workspace: Workspace, name: str, size: int, dtype: np.dtype[Any]) -> Selection:
    make = workspace.array if name in _RESULTS else workspace.scratch
    return Selection(make(f"{name}.indices", size, np.uint32), make(f"{name}.values", size, dtype))


def _merged(
    kernel: Callable[..., Any], first: Selection, second: Selection, workspace: Workspace, name: str
) -> Selection:
    out = _capacity(workspace, name, first.indices.size + second.indices.size, first.values.dtype)
    size = kernel(first.indices, first.values, second.indices, second.values, out.indices, out.values)
    return Selection(out.indices[:size], out.values[:size])


def _intersection(selection: Selection, indices: NDArray[np.uint32], workspace: Workspace, name: str) -> Selection:
    out = _capacity(workspace, name, min(selection.indices.size, indices.size), selection.values.dtype)
    size = kernels.intersect(selection.indices, selection.values, indices, out.indices, out.values)
    return Selection(out.indices[:size], out.values[:size])


def _split(selection: Selection, threshold: int, count: int, workspace: Workspace, name: str) -> Selection:
    dtype = selection.values.dtype
    kept = _capacity(workspace, f"{name}.kept", count, dtype)
    left = _capacity(workspace, f"{name}.left", selection.indices.size - count, dtype)
    outputs = kept.indices, kept.values, left.indices, left.values
    kernels.split_largest(selection.indices, selection.values, threshold, *outputs)
    return kept


def _quantiles(indices: NDArray[np.uint32], size: int) -> list[int]:
    """Return where a rank would cut between ``size`` regions: -1 everywhere if it has selected nothing.

    >>> _quantiles(np.array([1, 2, 3, 50], np.uint32), 2), _quantiles(np.array([], np.uint32), 3)
    ([3], [-1, -1])
    """
    count = indices.size
    if not count:
        return [-1] * (size - 1)
    return [int(indices[place * count // size]) for place in range(1, size)]


def _mean_bounds(cuts: NDArray[np.int64], before: Sequence[int]) -> list[int]:
    """Return the boundaries between regions: the means of all ranks' quantiles, rounded down.

    >>> _mean_bounds(np.array([[3], [-1], [6]]), [0, 5, 10])
    [0, 4, 10]
    """
    rows = [[int(cut) for cut in row] for row in cuts if -1 not in row]
    if not rows:
        return list(before)
    return [before[0], *(sum(column) // len(rows) for column in zip(*rows, strict=True)), before[-1]]


def _overlaps(counts: Sequence[int], targets: Sequence[int], rank: int) -> list[int]:
    """Return the number of a rank's elements that go to each when a list that ranks hold in pieces is cut again.

    >>> [_overlaps([6, 0, 3], [3, 3, 3], rank) for rank in range(3)]
    [[3, 3, 0], [0, 0, 0], [0, 0, 3]]
    """
    start = sum(counts[:rank])
    stop = start + counts[rank]
    bounds = pairwise([0, *accumulate(targets)])
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in bounds]
