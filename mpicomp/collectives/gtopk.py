"""gTop-k: selections are added pair by pair up a tree, and only the largest elements go on."""

from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import (
    Exchange,
    LazyMean,
    Result,
    Scheme,
    check_undamaged,
    count_round,
    far_from_largest,
    flags_of,
    gather_counts,
    undelivered,
)
from mpicomp.collectives.selection import added, less, parted
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import (
    DAMAGED,
    NONFINITE,
    Selection,
    Sparse,
    Wire,
    capacity_bytes,
    message_bytes,
    parse_padded_message,
    write_damaged,
    write_message,
)
from mpicomp.device import to_python
from mpicomp.errors import MessageError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)


@register
class Gtopk(Scheme[Sparsifier]):
    """A binomial tree of merges that keep k elements, then a bcast of what the root holds.

    In hop j the ranks whose lowest set bit is bit j send what they hold to the rank 2**j below, which adds the values
    of common indices and keeps the k largest, the lower index first where magnitudes are equal. Any number of
    ranks will do. k is the compressor's count; where that varies it is the largest of all ranks, for which an
    allgatherv of one integer a rank comes first.

    Nothing is lost: who drops an element, or rounds one to 16 bits, keeps what that takes from the sum in the own
    residual, which may so grow at indices that the rank has not selected itself.
    """

    id: ClassVar[str] = "gtopk"
    precedence: ClassVar[int] = 6
    paper: ClassVar[str] = (
        "gTop-k, Shi et al. 2019, arXiv 1901.04359; any number of ranks, integer indices; the rank that merges keeps "
        "what it drops (the paper's put-back returns only own values that miss the result, and loses partial sums)"
    )
    messages: ClassVar[str] = "sparse"
    may_drop_selected = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        counts = [] if self.compressor.count(numel) is not None else [count_round(group)]
        room = self._room(self.compressor.expected(numel), numel, dtype)
        return [*counts, *_hops(group, room), Round("bcast", (room,), _BYTE)]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, workspace, numel, dtype = context.group, context.workspace, accumulated.numel, accumulated.dtype
        selection = self.compressor.select(accumulated, context)
        count = self.compressor.count(numel)
        if count is None:
            count = max((yield from gather_counts(self.id, selection.indices.size, numel, context)))
        wire, room = self.compressor.wire_for(count, numel), self._room(count, numel, dtype)
        node = _Node(selection, count, accumulated, context)
        message = workspace.array("message", room, _BYTE)

        for hop in _hops(group, room):
            if hop.peers[0] is not None:
                node.write(message, wire)
                hop.send = message
            if hop.peers[1] is not None:
                hop.recv = workspace.array("incoming", room, _BYTE)
            incoming = yield hop
            if hop.peers[1] is not None:
                try:
                    node.merge(_read(incoming, hop.peers[1], numel, dtype, workspace))
                except MessageError as error:
                    node.problem = error
        spread = Round("bcast", (room,), _BYTE, recv=workspace.array("incoming", room, _BYTE))
        if group.rank == 0:
            node.write(message, wire)
            spread.send = message
        try:
            total = _read((yield spread), 0, numel, dtype, workspace)
        except MessageError as error:
            return undelivered(accumulated, error, stale=False)
        check_undamaged("gtopk", total.flags, node.problem)

        add = partial(kernels.scatter_add, total.selection.indices, total.selection.values, 1 / group.size)
        # Sums can be infinite where no rank's value is. They are the largest, so that they come to the root.
        [infinite] = to_python(kernels.count_reaching(total.selection.values, kernels.magnitude_bits(np.inf, dtype)))
        kept = float(total.selection.indices.size)
        mean = LazyMean.sum_of(numel, dtype, add)
        return Result.from_headers(mean, node.sent, kept, total.flags, total.energy, total.lost, infinite > 0)

    def _room(self, count: int, numel: int, dtype: np.dtype[Any]) -> int:
        """Return the bytes of a message in any hop: unions have at least as many elements as one of their parts."""
        bytes_of = capacity_bytes if self.compressor.count(numel) is None else message_bytes
        return bytes_of(count, numel, dtype, self.compressor.wire_for(count, numel))


class _Node:
    """State of one rank on its way up the tree: the selection that it holds, and the flags, energy and loss so far."""

    def __init__(self, selection: Selection, count: int, accumulated: GradientWithResidual, context: Context) -> None:
        self.sent = selection
        self.problem: MessageError | None = None
        self._held = selection
        self._count = count
        self._accumulated = accumulated
        self._workspace = context.workspace
        self._ranks = context.group.size
        self._flags = flags_of(accumulated)
        self._energy = accumulated.energy
        self._lost = 0.0  # by the ranks above
        self._turns: dict[str, int] = {}

    def merge(self, message: Sparse) -> None:
        """Add another rank's selection and drop all but the largest elements."""
        self._flags |= message.flags
        self._energy += message.energy
        self._lost += message.lost
        self._held = added(self._held, message.selection, self._workspace, self._other("union"))
        if self._held.indices.size > self._count:
            threshold = kernels.kth_magnitude(self._held.values, self._count)
            self._held, left = parted(self._held, threshold, self._count, self._workspace, "merged")
            self._keep(left)

    def write(self, message: NDArray[np.uint8], wire: Wire) -> None:
        """Write the message to the next rank; nothing is merged afterwards."""
        array = self._accumulated.array()
        if self.problem is not None or self._flags & DAMAGED:
            write_damaged(message)
            return
        if wire.values is not None:
            self._round(wire.values)
        [change] = to_python(kernels.norm_change(array, self.sent.indices, self.sent.values))
        lost = max(0.0, self._accumulated.energy + change)
        if not far_from_largest(self._energy * self._ranks**4, array.dtype):
            # Messages may add up to more than the largest number where what is held on the way does not.
            with np.errstate(over="ignore", invalid="ignore"):
                left = array[self.sent.indices] - self.sent.values
            self._flags |= NONFINITE * (not bool(np.isfinite(left).all()))
        size = message_bytes(self._held.indices.size, array.size, array.dtype, wire)
        message[size:] = 0
        write_message(
            message[:size], self._held, array.size, wire, self._flags, self._energy, self._energy - self._lost - lost
        )

    def _round(self, values: str) -> None:
        exact, size = self._held, self._held.indices.size
        rounded = self._workspace.array("rounded", size, exact.values.dtype)
        error = self._workspace.array("error", size, exact.values.dtype)
        kernels.narrow(exact.values, values, self._workspace.array("halves", size, np.uint16), rounded)
        with np.errstate(invalid="ignore"):
            np.subtract(exact.values, rounded, out=error)
        self._held = Selection(exact.indices, rounded)
        self._keep(Selection(exact.indices, error))

    def _keep(self, part: Selection) -> None:
        """Take a part that stays on this rank out of the sent selection."""
        self.sent = less(self.sent, part, self._workspace, self._other("sent"))

    def _other(self, name: str) -> str:
        """Return the one of a name's two rooms that was not taken last."""
        self._turns[name] = self._turns.get(name, 0) + 1
        return f"{name}.{self._turns[name] % 2}"


def _hops(group: Group, room: int) -> list[Round]:
    """Return this rank's round in every hop of the tree."""
    hops = []
    for level in range((group.size - 1).bit_length()):
        step = 1 << level
        place, above = group.rank % (2 * step), group.rank + step
        if place == step:
            hops.append(Round("sendrecv", (room, 0), _BYTE, peers=(group.rank - step, None)))
        elif place == 0 and above < group.size:
            hops.append(Round("sendrecv", (0, room), _BYTE, peers=(None, above)))
        else:
            hops.append(Round("sendrecv", (0, 0), _BYTE))
    return hops


def _read(message: NDArray[np.uint8], rank: int, numel: int, dtype: np.dtype[Any], workspace: Workspace) -> Sparse:
    try:
        return parse_padded_message(message, numel, dtype, workspace)
    except MessageError as error:
        raise MessageError(f"gtopk: from rank {rank}: {error}") from error
