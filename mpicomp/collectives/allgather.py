"""Every rank's sparse message to every rank, which all decode in rank order."""

import functools
import operator
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
    NONFINITE,
    SHARING,
    STALE,
    MessageHeader,
    Selection,
    message_bytes,
    parse_header,
    parse_message,
    unpack_sharing,
    write_message,
)
from mpicomp.device import current_device, to_python
from mpicomp.errors import MessageError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.workspace import Workspace

_MANY = 16  # if more than one element in so many was touched, setting the whole array to zero is faster


class SparseMean:
    """Sums sparse selections into an array that it clears only where the step before has written.

    Memory of a device is cleared whole, which takes one launch.
    """

    def __init__(self, numel: int, dtype: np.dtype[Any]) -> None:
        device = current_device()
        self.array: NDArray[np.floating] = device.zeros(numel, dtype)
        self._workspace = Workspace(device)
        self._on_host = isinstance(self.array, np.ndarray)
        self._touched: list[NDArray[np.uint32]] = []

    @classmethod
    def cleared(cls, workspace: Workspace, numel: int, dtype: np.dtype[Any]) -> "SparseMean":
        """Return the workspace's mean of this length, all zero."""
        mean = workspace.made((cls, numel, dtype), lambda: cls(numel, dtype))
        mean._clear()
        return mean

    def add(self, indices: NDArray[np.uint32], values: NDArray[np.floating], factor: float) -> bool:
        """Add ``factor * values`` at ``indices``; return False (0-d on a device) and add none if one is too large."""
        self._touch(indices)
        added: bool = kernels.scatter_add(indices, values, factor, self.array)
        if self._on_host and not added:
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
            if self._on_host:
                if not right:
                    break
                for start, count in zip(indices_at, counts, strict=True):
                    part = indices.view(np.uint8)[start : start + 4 * count]
                    self._touch(part.view(np.uint32))
            right = kernels.sparse_add(
                values, values_at, indices, indices_at, counts, stored, factor, self.array, right
            )
        if self._on_host and not right:
            self._touched.clear()  # which may be out of range
            self.array.fill(0)
        return right

    def _touch(self, indices: NDArray[np.uint32]) -> None:
        if self._on_host:
            touched = self._workspace.array(f"touched.{len(self._touched)}", indices.size, np.uint32)
            touched[:] = indices
            self._touched.append(touched)

    def _clear(self) -> None:
        if not self._on_host or sum(touched.size for touched in self._touched) > self.array.size // _MANY:
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


@register
class Allgather(Scheme[Sparsifier]):
    """Allgatherv of sparse messages with their true lengths.

    Where the compressor selects a fixed number of elements the lengths are known and nothing is asked; where
    the values decide, one round of one integer a rank comes first. A rank may select nothing.
    """

    id: ClassVar[str] = "allgather"
    precedence: ClassVar[int] = 2
    paper: ClassVar[str] = "none: MPI_Allgatherv of sparse messages"
    messages: ClassVar[str] = "sparse"
    needs_whole_message: ClassVar[bool] = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        gather = Round("allgatherv", [self._bytes(self.compressor.expected(numel), numel, dtype)] * group.size, _BYTE)
        return [gather] if self.compressor.count(numel) is not None else [count_round(group), gather]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, workspace = context.group, context.workspace
        numel, dtype = accumulated.numel, accumulated.dtype
        selection = self.compressor.select(accumulated, context)
        moments = accumulated.device_moments
        counts = [selection.indices.size] * group.size
        if self.compressor.count(numel) is None:
            counts = yield from gather_counts(self.id, counts[group.rank], numel, context)
        sizes = [self._bytes(count, numel, dtype) for count in counts]
        message = workspace.array("message", sizes[group.rank], _BYTE)
        wire = self.compressor.wire_for(counts[group.rank], numel)
        if wire.values is not None and np.may_share_memory(selection.values, accumulated.array()):
            selection = Selection(selection.indices, selection.values.copy())  # rounded in place below
        kept = selection.values if wire.values is None else kernels.energy(selection.values)
        flags = STALE * accumulated.stale
        write_message(message, selection, numel, wire, flags, moments.energy, kept, moments.finite)
        received = yield Round(
            "allgatherv", sizes, _BYTE, send=message, recv=workspace.array("messages", sum(sizes), _BYTE)
        )

        mean = SparseMean.cleared(workspace, numel, dtype)
        bounds = list(pairwise([0, *accumulate(sizes)]))
        headers: list[MessageHeader] = []
        try:
            for (start, stop), count in zip(bounds, counts, strict=True):
                headers.append(parse_header(received[start:stop], numel, dtype, count, start))
            readable = [header for header in headers if not header.flags & DAMAGED]
            [right] = to_python(mean.add_messages(received, readable, 1 / group.size))
            if not right:
                return undelivered(accumulated, self._wrong(received, bounds, numel, dtype, workspace), False)
        except MessageError as error:
            return undelivered(accumulated, MessageError(f"allgather: from rank {len(headers)}: {error}"), False)
        flags = functools.reduce(operator.or_, (header.flags for header in headers))
        energy, lost = sum(header.energy for header in headers), sum(header.lost for header in headers)
        return Result(
            mean=mean.array,
            sent=selection,
            energy=energy,
            gain=gain_of(lost, energy),
            kept=sum(counts) / group.size,
            nonfinite=bool(flags & NONFINITE) or not is_finite(mean.array, energy, group.size),
            stale=bool(flags & STALE),
        )

    def _wrong(
        self, received: Any, bounds: list[tuple[int, int]], numel: int, dtype: np.dtype[Any], workspace: Workspace
    ) -> MessageError:
        """Return what is wrong with the first message whose indices are."""
        for rank, (start, stop) in enumerate(bounds):
            try:
                parse_message(received[start:stop], numel, dtype, workspace)
            except MessageError as error:
                return MessageError(f"allgather: from rank {rank}: {error}")
        raise AssertionError("all messages can be read one by one")

    def _bytes(self, count: int, numel: int, dtype: np.dtype[Any]) -> int:
        return message_bytes(count, numel, dtype, self.compressor.wire_for(count, numel))
