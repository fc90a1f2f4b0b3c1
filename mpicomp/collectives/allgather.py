"""Every rank's sparse message to every rank, which all decode in rank order."""

import functools
import operator
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.collectives.scheme import (
    Exchange,
    Result,
    Scheme,
    check_counts,
    gain_of,
    is_finite,
    undelivered,
)
from mpicomp.collectives.sparse_mean import SparseMean
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import (
    DAMAGED,
    NONFINITE,
    STALE,
    MessageHeader,
    Selection,
    message_bytes,
    parse_header,
    parse_message,
    write_message,
)
from mpicomp.device import to_python
from mpicomp.errors import MessageError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.workspace import Workspace

_COUNT = np.dtype(np.int64)
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
        """One allgatherv, with one for the counts before it where they vary; see `Scheme.rounds`."""
        gather = Round("allgatherv", [self._bytes(self.compressor.expected(numel), numel, dtype)] * group.size, _BYTE)
        return [gather] if self.compressor.count(numel) is not None else [self._ask(group), gather]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        """Select, gather, decode; see `Scheme.exchange`."""
        group, workspace = context.group, context.workspace
        numel, dtype = accumulated.numel, accumulated.dtype
        selection = self.compressor.select(accumulated, context)
        moments = accumulated.device_moments
        counts = [selection.indices.size] * group.size
        if self.compressor.count(numel) is None:
            ask = self._ask(group)
            ask.send = np.array([selection.indices.size], _COUNT)
            ask.recv = workspace.host_array("counts", group.size, _COUNT)
            counts = check_counts(self.id, (yield ask), 0, numel, (group.rank, counts[group.rank]))
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
        told: list[MessageHeader] = []
        try:
            for (start, stop), count in zip(bounds, counts, strict=True):
                told.append(parse_header(received[start:stop], numel, dtype, count, start))
            readable = [own for own in told if not own.flags & DAMAGED]
            [right] = to_python(mean.add_messages(received, readable, 1 / group.size))
            if not right:
                return undelivered(accumulated, self._wrong(received, bounds, numel, dtype, workspace), False)
        except MessageError as error:
            return undelivered(accumulated, MessageError(f"allgather: from rank {len(told)}: {error}"), False)
        flags = functools.reduce(operator.or_, (own.flags for own in told))
        energy, lost = sum(own.energy for own in told), sum(own.lost for own in told)
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

    def _ask(self, group: Group) -> Round:
        return Round("allgatherv", [1] * group.size, _COUNT)

    def _bytes(self, count: int, numel: int, dtype: np.dtype[Any]) -> int:
        return message_bytes(count, numel, dtype, self.compressor.wire_for(count, numel))
