"""Every rank's sparse or packed message to every rank, which all decode in rank order."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import (
    COUNT,
    Exchange,
    MeanWriter,
    Memory,
    Result,
    Scheme,
    add_unless_zero,
    failed_result,
    far_from_largest,
    gather_counts,
    is_finite,
)
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import PackedSelection, Quantiser, Sparsifier, packers
from mpicomp.compressors.wire import (
    DAMAGED,
    HEADER_BYTES,
    NONFINITE,
    SHARING,
    STALE,
    Selection,
    SparseHeader,
    Wire,
    count_in,
    heads_of,
    read_dense_headers,
    read_sparse,
    read_sparse_header,
    sparse_lead,
    sparse_parts,
    unpack_sharing,
    write_dense_header,
    write_sparse,
)
from mpicomp.errors import MessageError
from mpicomp.gpu import current_device, to_python
from mpicomp.kernels import cpu
from mpicomp.mpi.rounds import Group, Round
from mpicomp.registry import register
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)
_PLAIN = Wire()
_HARMLESS = (NONFINITE | STALE) << 8  # bits of a message's first word that do not change how it is read


class MessageLayout:
    """Places of the ranks' messages in the memory that is gathered; it serves all steps with the same counts."""

    def __init__(self, compressor: Sparsifier, counts: list[int], like: Accumulated, context: Context) -> None:
        self.group, self.workspace = context.group, context.workspace
        self.counts, self.numel, self.dtype = counts, like.numel, like.dtype
        self.kept = sum(counts) / len(counts)
        self.is_fixed = compressor.count(self.numel) is not None
        """Whether all ranks send the same number of elements at each step."""
        self.wires = [compressor.wire_for(count, self.numel) for count in counts]
        self.middles, sizes = [], []  # where indices begin in each message, and its bytes
        for count, wire in zip(counts, self.wires, strict=True):
            middle, size = sparse_parts(count, self.numel, self.dtype, wire.values, wire.indices)
            self.middles.append(middle)
            sizes.append(size)
        self.bounds = list(pairwise(accumulate(sizes, initial=0)))
        self.message = self.workspace.array("message", sizes[self.group.rank], _BYTE)
        self.received = self.workspace.array("allgather.messages", sum(sizes), _BYTE)
        self.task = Round("allgatherv", sizes, _BYTE, send=self.message, recv=self.received)

    def write(self, selection: Selection, flags: int, moments: cpu.Moments) -> None:
        """Fill this rank's message."""
        wire = self.wires[self.group.rank]
        kept = selection.values if wire.values is None else kernels.energy(selection.values)
        write_sparse(self.message, selection, self.numel, wire, flags, moments.energy, kept, moments.finite)

    def read(self, received: NDArray[np.uint8]) -> tuple[int, float, float, MeanWriter]:
        """Return the flags of all messages together, sums of energy and lost energy, and the mean; raise on damage."""
        flags, energy, lost, headers = 0, 0.0, 0.0, list[SparseHeader]()
        try:
            messages = [received[start:stop] for start, stop in self.bounds]
            places = zip(messages, self.counts, self.bounds, heads_of(messages), strict=True)
            for message, count, (start, _), head in places:
                header = read_sparse_header(message, self.numel, self.dtype, count, start, head)
                headers.append(header)
                flags, energy, lost = flags | header.flags, energy + header.energy, lost + header.lost
        except MessageError as error:
            raise MessageError(f"from rank {len(headers)}: {error}") from error
        factor = 1 / len(headers)
        write, answers = mean_of_messages(received, headers, factor, self.numel, self.dtype, self.workspace)
        if all(to_python(*answers)):
            return flags, energy, lost, write
        for rank, (start, stop) in enumerate(self.bounds):  # which of them is wrong
            try:
                read_sparse(received[start:stop], self.numel, self.dtype, self.workspace)
            except MessageError as error:
                raise MessageError(f"from rank {rank}: {error}") from error
        raise AssertionError("all messages can be read one by one")


class PlainLayout(MessageLayout):
    """Messages of uncoded values and indices in host memory: all places are known."""

    def __init__(self, compressor: Sparsifier, counts: list[int], like: Accumulated, context: Context) -> None:
        super().__init__(compressor, counts, like, context)
        starts, itemsize = np.array([start for start, _ in self.bounds], np.int64), self.dtype.itemsize
        self._values_at = (starts + HEADER_BYTES) // itemsize
        self._indices_at = (starts + self.middles) // 4
        self._counts = np.array(counts, np.int64)
        self._words = self.received.view(np.uint32)
        self._leads = [sparse_lead(count, self.dtype, _PLAIN) for count in counts]
        self._headers = struct.Struct("<" + "".join(f"Qdd{size - HEADER_BYTES}x" for size in self.task.counts))
        message, rank = self.message, self.group.rank
        middle, count = self.middles[rank], counts[rank]
        message.fill(0)
        self._own_values = message[HEADER_BYTES : HEADER_BYTES + count * self.dtype.itemsize].view(self.dtype)
        self._own_indices = message[middle : middle + 4 * count].view(np.uint32)

    def write(self, selection: Selection, flags: int, moments: cpu.Moments) -> None:
        lead = self._leads[self.group.rank] | flags << 8
        kept = cpu.write_pairs_plain(selection.values, selection.indices, self._own_values, self._own_indices)
        cpu.write_header(self.message, lead, moments.finite, moments.energy, kept, 0.0)

    def read(self, received: NDArray[np.uint8]) -> tuple[int, float, float, MeanWriter]:
        flags, fields = 0, self._headers.unpack_from(received.data)
        for lead, expected in zip(fields[::3], self._leads, strict=True):
            flags |= lead ^ expected
        if flags & ~_HARMLESS:
            return super().read(received)
        sound = cpu.ascending_parts(self._words, self._indices_at, self._counts, self.numel)
        if sound < self.group.size:
            raise MessageError(f"from rank {sound}: message: indices do not ascend below {self.numel}")
        places = self.received, self._values_at, self._indices_at, self._counts
        return flags >> 8, sum(fields[1::3]), sum(fields[2::3]), lambda out: cpu.mean_of_pairs(*places, out)


def mean_of_messages(
    received: NDArray[np.uint8],
    headers: Sequence[SparseHeader],
    factor: float,
    numel: int,
    dtype: np.dtype[Any],
    workspace: Workspace,
) -> tuple[MeanWriter, list[Any]]:
    """Return ``factor`` times the sum of all undamaged messages, and whether each of their parts is sound.

    Sound are indices that ascend below ``numel``, and scales that are finite. On a device these are 0-d arrays.
    """
    answers: list[Any] = []
    additions: list[Any] = []  # arguments of the kernel
    kernel = kernels.of(received)
    readable = [header for header in headers if not header.flags & DAMAGED]
    for (stored, coding), members in groupby(readable, key=lambda header: (header.stored, header.coding)):
        group, place = list(members), len(additions)
        counts = [header.count for header in group]
        indices: Any = received
        indices_at = [header.indices_at for header in group]
        if coding != "plain":
            indices = workspace.array(f"indices.{place}", sum(counts), np.uint32)
            answers.append(kernels.decode_indices_of(received, indices_at, counts, numel, indices))
            indices_at = [4 * start for start in accumulate(counts[:-1], initial=0)]
        else:
            for start, count in zip(indices_at, counts, strict=True):
                answers.append(kernels.ascending_below(received[start : start + 4 * count].view(np.uint32), numel))
        values, values_at = received, [header.values_at for header in group]
        if stored in SHARING:
            unpacked = workspace.array(f"values.{place}", sum(counts), dtype)
            answers.append(unpack_sharing(received, group, unpacked))
            values, stored = unpacked.view(np.uint8), dtype.name
            values_at = [dtype.itemsize * start for start in accumulate(counts[:-1], initial=0)]
        additions.append((values, values_at, indices, indices_at, counts, stored, factor))

    def write(out: NDArray[np.floating], *subtracted: Any) -> None:
        out.fill(0)
        for arguments in additions:
            if subtracted:
                kernel.sparse_add_and_subtract(*arguments, out, *subtracted)
                subtracted = ()
            else:
                kernel.sparse_add(*arguments, out)

    return write, answers


@register
class Allgather(Scheme[Sparsifier]):
    """Allgatherv of sparse messages with their true lengths, which one integer a rank announces if values decide them.

    A rank may select nothing.
    """

    id: ClassVar[str] = "allgather"
    precedence: ClassVar[int] = 2
    paper: ClassVar[str] = "none: MPI_Allgatherv of sparse messages"
    messages: ClassVar[str] = "sparse"
    needs_whole_message: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        count = self.compressor.expected(numel)
        gather = Round("allgatherv", [self.compressor.message_bytes(count, numel, dtype)] * group.size, _BYTE)
        if self.compressor.count(numel) is not None:
            return [gather]
        return [Round("allgatherv", [1] * group.size, COUNT), gather]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        count, needed = self.compressor.expected(numel), super().memory(numel, dtype, group)
        decoded = 0 if self.compressor.wire_for(count, numel) == _PLAIN else count * (4 + dtype.itemsize)
        return needed._replace(held=needed.held + group.size * decoded)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group, workspace, numel = context.group, context.workspace, accumulated.numel
        packed = None if accumulated.kernels is cpu else self.compressor.select_packed(accumulated, context)
        message: NDArray[np.uint8] | None = None
        if packed is None:
            selection = self.compressor.select(accumulated, context)
        elif packed.uncounted is None:
            selection, message = packed, packed.message
        else:
            selection, message = self._counted(packed, accumulated)
        layout: MessageLayout | None = None
        if self in workspace.prepared:
            layout = workspace.prepared[self]
            if layout.group is not group or layout.numel != numel:
                layout = None
        if layout is None or not layout.is_fixed:
            counts = [selection.indices.size] * group.size
            if self.compressor.count(numel) is None:
                counts = yield from gather_counts(self.id, counts[group.rank], numel, context)
            if layout is None or layout.counts != counts:
                plain = accumulated.kernels is cpu and all(
                    self.compressor.wire_for(count, numel) == _PLAIN for count in counts
                )
                layout = (PlainLayout if plain else MessageLayout)(self.compressor, counts, accumulated, context)
                workspace.prepared = {self: layout}
        if layout.wires[group.rank].values is not None and np.may_share_memory(selection.values, accumulated.array()):
            selection = Selection(selection.indices, selection.values.copy())  # rounded in place below
        task = layout.task
        if message is None:
            layout.write(selection, STALE * accumulated.stale, accumulated.device_moments)
        else:
            task = replace(task, send=message)
        received = yield task
        try:
            flags, energy, lost, write = layout.read(received)
        except MessageError as error:
            return failed_result(accumulated, MessageError(f"allgather: {error}"), False)
        mean: NDArray[np.floating] | MeanWriter = write
        finite = True
        if not far_from_largest(energy * group.size, accumulated.dtype):
            mean = workspace.array("mean", numel, accumulated.dtype)
            write(mean)
            finite = is_finite(mean, energy, group.size)
        result = Result.from_headers(mean, selection, layout.kept, flags, energy, lost, finite)
        result.subtracts = packed is not None
        return result

    def _counted(self, found: PackedSelection, accumulated: Accumulated) -> tuple[Selection, NDArray[np.uint8]]:
        # The host waits once for the selection and its message.
        compressor, numel, dtype, device = self.compressor, accumulated.numel, accumulated.dtype, current_device()
        assert found.uncounted is not None
        _, reached, note = found.uncounted
        usual = min(numel, compressor.expected(numel) * 5 // 4)
        likely = min(found.message.size, compressor.message_bytes(usual, numel, dtype))
        head, [number] = device.fetch_head(found.message, likely, reached)
        count = count_in(head)
        note(number)
        size = compressor.message_bytes(count, numel, dtype)
        if size > likely:
            head, _ = device.fetch_head(found.message, size)
        return Selection(found.indices[:count], found.values[:count]), head[:size]


@register
class PackedAllgather(Scheme[Quantiser]):
    """Allgatherv of packed arrays, whose mean is not packed again.

    Bytes and decoding grow with the number of ranks: for few ranks, short arrays, and where the second packing of
    `TwoPhase` would cost more than its bytes save.
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
        in_place = packer.packs_in_place and accumulated.overwrite("residual")
        message = workspace.scratch("outgoing", size, _BYTE)
        packed, key = message[HEADER_BYTES:], context.key(False)
        if in_place:
            lost, sent = packer.pack_in_place(accumulated, 0, packed, key), accumulated.array()
        else:
            sent = workspace.scratch("sent", numel, dtype)
            lost = packer.pack(accumulated.array(), packed, sent, key)
        moments, lost = accumulated.device_moments, add_unless_zero(lost, accumulated.lost)
        write_dense_header(message, numel, STALE * accumulated.stale, moments.energy, lost, moments.finite)
        gather.send = message
        gather.recv = workspace.array("messages", size * group.size, _BYTE)
        messages = (yield gather).reshape(group.size, size)

        try:
            flags, energy, lost = read_dense_headers(messages, numel)
        except MessageError as error:
            return failed_result(accumulated, MessageError(f"packed-allgather: {error}"), False)

        def write(out: NDArray[np.floating]) -> None:
            packer.unpack_sum(messages, HEADER_BYTES, 1 / group.size, out)

        finite = True
        if not far_from_largest(energy * group.size, dtype):
            written = workspace.scratch("written mean", numel, dtype)
            write(written)
            finite = bool(np.isfinite(written).all())
        if not self.compressor.averages:  # the winning signs are every rank's share, whatever its own
            sent, lost = workspace.array("written mean", numel, dtype), math.nan
            write(sent)
        return Result.from_headers(write, sent, float(numel), flags, energy, lost, finite)
