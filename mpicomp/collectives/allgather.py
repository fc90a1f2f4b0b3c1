"""Every rank's sparse message to every rank, which all decode in rank order."""

import struct
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import (
    Exchange,
    Result,
    Scheme,
    count_round,
    gain_of,
    gather_counts,
    is_finite,
    undelivered,
)
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import (
    DAMAGED,
    HEADER_BYTES,
    NONFINITE,
    SHARING,
    STALE,
    MessageHeader,
    Selection,
    Wire,
    lead_of,
    message_bytes,
    message_parts,
    parse_header,
    parse_message,
    unpack_sharing,
    write_message,
)
from mpicomp.device import current_device, to_python
from mpicomp.errors import MessageError
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.workspace import Workspace

_MANY = 16  # if more than one element in so many was touched, setting the whole array to zero is faster
_SHORT = 1 << 14  # elements; an array of fewer is set to zero sooner than elements are noted and cleared


class SparseMean:
    """Sums sparse selections into an array that it clears only where the step before has written.

    Memory of a device is cleared whole, which takes one launch.
    """

    def __init__(self, numel: int, dtype: np.dtype[Any]) -> None:
        device = current_device()
        self.array: NDArray[np.floating] = device.zeros(numel, dtype)
        self._workspace = Workspace(device)
        self._on_host = isinstance(self.array, np.ndarray)
        self._notes = self._on_host and numel > _SHORT  # whether it notes where it was written to
        self._touched: list[NDArray[np.uint32]] = []

    @classmethod
    def cleared(cls, workspace: Workspace, numel: int, dtype: np.dtype[Any]) -> "SparseMean":
        """Return the workspace's mean of this length, all zero."""
        mean = workspace.made((cls, numel, dtype), lambda: cls(numel, dtype))
        mean.clear()
        return mean

    def add(self, indices: NDArray[np.uint32], values: NDArray[np.floating], factor: float) -> bool:
        """Add ``factor * values`` at ``indices``; return False (0-d on a device) and add none if one is too large."""
        self._touch(indices)
        added: bool = kernels.scatter_add(indices, values, factor, self.array)
        if self._notes and not added:
            self._touched.pop()
        return added

    def add_messages(self, messages: NDArray[np.uint8], all_headers: Sequence[MessageHeader], factor: float) -> bool:
        """Add ``factor`` times the selections of several undamaged messages, in order; return whether all were sound.

        Sound are indices that ascend below the length of the mean, and scales that are finite. If any is not, the mean
        may hold anything. On a device the answer is a 0-d array.
        """
        right = True
        for (stored, coding), group in groupby(all_headers, key=lambda header: (header.stored, header.coding)):
            headers = list(group)
            counts = [header.count for header in headers]
            indices, indices_at = messages, [header.indices_at for header in headers]
            if coding != "plain":
                decoded = self._workspace.array("decoded", sum(counts), np.uint32)
                sound = kernels.decode_indices_of(messages, indices_at, counts, self.array.size, decoded)
                right = _both(right, sound)
                indices, indices_at = decoded, [4 * start for start in accumulate(counts[:-1], initial=0)]
            values, values_at = messages, [header.values_at for header in headers]
            if stored in SHARING:
                unpacked = self._workspace.array("values", sum(counts), self.array.dtype)
                right = _both(right, unpack_sharing(messages, headers, unpacked))
                values, stored = unpacked.view(np.uint8), self.array.dtype.name
                values_at = [self.array.dtype.itemsize * start for start in accumulate(counts[:-1], initial=0)]
            right = self.add_parts(values, values_at, indices, indices_at, counts, stored, factor, right)
        return right

    def add_parts(
        self,
        values: NDArray[np.uint8],
        values_at: Sequence[int],
        indices: NDArray[Any],
        indices_at: Sequence[int],
        counts: Sequence[int],
        stored: str,
        factor: float,
        right: bool = True,
    ) -> bool:
        """Add selections, see `mpicomp.kernels.cpu.sparse_add`; if any is wrong, an array on the host becomes zero."""
        if self._notes and right:
            for start, count in zip(indices_at, counts, strict=True):
                self._touch(indices.view(np.uint8)[start : start + 4 * count].view(np.uint32))
        array = self.array
        right = kernels.of(array).sparse_add(
            values, values_at, indices, indices_at, counts, stored, factor, array, right
        )
        if self._on_host and not right:
            self._touched.clear()  # which may be out of range
            array.fill(0)
        return right

    def _touch(self, indices: NDArray[np.uint32]) -> None:
        if self._notes:
            touched = self._workspace.array(f"touched.{len(self._touched)}", indices.size, np.uint32)
            touched[:] = indices
            self._touched.append(touched)

    def clear(self) -> None:
        """Set all elements to zero."""
        if not self._notes or sum(touched.size for touched in self._touched) > self.array.size // _MANY:
            self.array.fill(0)
        else:
            for touched in self._touched:
                kernels.clear_at(touched, self.array)
        self._touched.clear()


def _both(first: bool, second: bool) -> bool:
    """Return whether two answers are yes, of which each may be known on a device only."""
    if first is True:
        return second
    return first if second is True else first & second


_BYTE = np.dtype(np.uint8)
_PLAIN = Wire()
_HARMLESS = (NONFINITE | STALE) << 8  # bits of a message's first word that do not change how it is read


class MessageLayout:
    """Places of the ranks' messages in the memory that is gathered; it serves all steps with the same counts."""

    def __init__(
        self, compressor: Sparsifier, group: Group, counts: list[int], context: Context, like: GradientWithResidual
    ) -> None:
        self.compressor, self.group, self.counts = compressor, group, counts
        self.is_fixed = False
        """Whether all ranks send the same number of elements at each step."""
        self.numel, self.dtype = like.numel, like.dtype
        self.wire = compressor.wire_for(counts[group.rank], self.numel)
        formats = [compressor.wire_for(count, self.numel) for count in counts]
        parts = [
            message_parts(count, self.numel, self.dtype, wire) for count, wire in zip(counts, formats, strict=True)
        ]
        sizes = [size for _, size in parts]
        starts = list(accumulate(sizes, initial=0))
        self.bounds = list(pairwise(starts))
        self.message = context.workspace.array("allgather.message", sizes[group.rank], _BYTE)
        self.received = context.workspace.array("allgather.messages", starts[-1], _BYTE)
        self.task = Round("allgatherv", sizes, _BYTE, send=self.message, recv=self.received)
        self.mean = SparseMean.cleared(context.workspace, self.numel, self.dtype)
        self.is_plain = like.kernels is cpu and all(wire == _PLAIN for wire in formats)
        """Whether values and indices of all messages are stored as they are, in memory of the host."""
        if self.is_plain:
            self.stored = self.dtype.name
            self.values_at = [start + HEADER_BYTES for start, _ in self.bounds]
            self.indices_at = [start + middle for start, (middle, _) in zip(starts, parts, strict=False)]
            self.leads = [lead_of(count, self.dtype, wire) for count, wire in zip(counts, formats, strict=True)]
            self._headers = struct.Struct("<" + "".join(f"Qdd{size - HEADER_BYTES}x" for size in sizes))
            self.message.fill(0)
            middle, count = parts[group.rank][0], counts[group.rank]
            self._values = self.message[HEADER_BYTES : HEADER_BYTES + count * self.dtype.itemsize].view(self.dtype)
            self._indices = self.message[middle : middle + 4 * count].view(np.uint32)

    def write(self, selection: Selection, flags: int, moments: cpu.Moments) -> None:
        """Fill this rank's message."""
        if self.is_plain:
            self._values[:] = selection.values
            self._indices[:] = selection.indices
            lead = self.leads[self.group.rank] | flags << 8
            cpu.write_header(self.message, lead, moments.finite, moments.energy, selection.values, 0.0)
            return
        kept = selection.values if self.wire.values is None else kernels.energy(selection.values)
        write_message(self.message, selection, self.numel, self.wire, flags, moments.energy, kept, moments.finite)

    def read(self, received: NDArray[np.uint8]) -> tuple[int, float, float, list[MessageHeader] | None]:
        """Return the flags of all messages together, the sums of energy and lost energy, and the headers.

        None for the headers stands for messages that have the parts of this layout.

        Raises
        ------
        MessageError
            If a header is damaged.
        """
        flags, energy, lost = 0, 0.0, 0.0
        if self.is_plain:
            fields = self._headers.unpack_from(received.data)
            for lead, expected in zip(fields[::3], self.leads, strict=True):
                different = lead ^ expected
                if different & ~_HARMLESS:
                    break
                flags |= different
            else:
                return flags >> 8, sum(fields[1::3]), sum(fields[2::3]), None
        headers: list[MessageHeader] = []
        flags = 0
        try:
            for (start, stop), count in zip(self.bounds, self.counts, strict=True):
                header = parse_header(received[start:stop], self.numel, self.dtype, count, start)
                headers.append(header)
                flags, energy, lost = flags | header.flags, energy + header.energy, lost + header.lost
        except MessageError as error:
            raise MessageError(f"from rank {len(headers)}: {error}") from error
        return flags, energy, lost, headers


@register
class Allgather(Scheme[Sparsifier]):
    """Allgatherv of sparse messages with their true lengths.

    If the compressor selects a fixed number of elements the lengths are known; if the values decide, one round of one
    integer a rank comes first. A rank may select nothing.
    """

    id: ClassVar[str] = "allgather"
    precedence: ClassVar[int] = 2
    paper: ClassVar[str] = "none: MPI_Allgatherv of sparse messages"
    messages: ClassVar[str] = "sparse"
    needs_whole_message: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        count = self.compressor.expected(numel)
        size = message_bytes(count, numel, dtype, self.compressor.wire_for(count, numel))
        gather = Round("allgatherv", [size] * group.size, _BYTE)
        return [gather] if self.compressor.count(numel) is not None else [count_round(group), gather]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, workspace, numel = context.group, context.workspace, accumulated.numel
        selection = self.compressor.select(accumulated, context)
        moments = accumulated.device_moments
        layout = workspace.last_layout
        if (
            layout is not None and (layout.compressor is not self.compressor or layout.group is not group
            or layout.numel != numel or layout.dtype != accumulated.dtype)
        ):  # fmt: skip
            layout = None
        if layout is None or not layout.is_fixed:
            counts, is_fixed = [selection.indices.size] * group.size, self.compressor.count(numel) is not None
            if not is_fixed:
                counts = yield from gather_counts(self.id, counts[group.rank], numel, context)
            if layout is None or layout.counts != counts:
                layout = MessageLayout(self.compressor, group, counts, context, accumulated)
                layout.is_fixed, workspace.last_layout = is_fixed, layout
        if layout.wire.values is not None and np.may_share_memory(selection.values, accumulated.array()):
            selection = Selection(selection.indices, selection.values.copy())  # rounded in place below
        layout.write(selection, STALE * accumulated.stale, moments)
        received = yield layout.task
        mean = layout.mean
        mean.clear()
        try:
            flags, energy, lost, headers = layout.read(received)
            if headers is None:
                right = mean.add_parts(
                    received, layout.values_at, received, layout.indices_at, layout.counts, layout.stored,
                    1 / group.size,
                )  # fmt: skip
            else:
                readable = [header for header in headers if not header.flags & DAMAGED]
                [right] = to_python(mean.add_messages(received, readable, 1 / group.size))
            if not right:
                return undelivered(accumulated, self._wrong(received, layout, workspace), False)
        except MessageError as error:
            return undelivered(accumulated, MessageError(f"allgather: {error}"), False)
        return Result(
            mean=mean.array,
            sent=selection,
            energy=energy,
            gain=gain_of(lost, energy),
            kept=sum(layout.counts) / group.size,
            nonfinite=bool(flags & NONFINITE) or not is_finite(mean.array, energy, group.size),
            stale=bool(flags & STALE),
        )

    def _wrong(self, received: Any, layout: MessageLayout, workspace: Workspace) -> MessageError:
        """Return the error of the first message whose indices are wrong."""
        for rank, (start, stop) in enumerate(layout.bounds):
            try:
                parse_message(received[start:stop], layout.numel, layout.dtype, workspace)
            except MessageError as error:
                return MessageError(f"allgather: from rank {rank}: {error}")
        raise AssertionError("all messages can be read one by one")
