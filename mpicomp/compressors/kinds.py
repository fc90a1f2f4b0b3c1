"""Kinds of compressors by message: each base class names the methods to implement for a new one."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import Compressor, bound, num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.wire import INDICES, VALUES, Selection, Wire, compact, sparse_bytes, value_bytes
from mpicomp.errors import MessageError
from mpicomp.kernels import sizes
from mpicomp.setting_checks import check_choice, check_ratio

Floats = NDArray[np.floating]
Bytes = NDArray[np.uint8]

CACHED_NUMEL = 1 << 16
"""Elements that, with their gradient and residual, stay in the second-level cache."""
PIECE_NUMEL = 1 << 19
"""Elements of a part that are packed by themselves where no grid reaches across, so that a whole part needs no copy."""
LARGEST_KEY = (1 << 64) - 1


@dataclass
class PackedSelection(Selection):
    """A selection on a device whose values lie in its message."""

    message: Any
    uncounted: tuple[Any, Any, Callable[[float], None]] | None = None
    """Where the host does not know the number of elements: that, and a number for the function, as 0-d arrays."""


@dataclass(frozen=True, repr=False)
class Sparsifier(Compressor):
    """A compressor that sends some elements and keeps the others in the residual.

    To add one: derive from it and implement `select` and, where the number of selected elements depends on the
    array's length alone, `count`; register it with `mpicomp.register`. A field ``ratio`` is checked here.

    Parameters
    ----------
    wire : {None, "fp16", "bf16", "q8", "q4", "q2", "signs"}
        Format of values; rounding errors stay in the residual. ``"q8"``, ``"q4"`` and ``"q2"`` take a sign and 7, 3 or
        1 bits of magnitude a value, and two scales for every 256; ``"signs"`` takes a bit a value and one mean
        magnitude for the message. These need a collective that delivers whole messages.
    indices : {"auto", "plain", "elias-fano"}
        Format of indices: 32-bit integers, a code near their entropy, or the choice of `wire.compact`.

    Notes
    -----
    Selected values in few bits are from Qsparse-local-SGD, Basu et al. 2019, arXiv 1906.02367, and SparseLoCo, Sarfi et
    al. 2025, arXiv 2508.15706. Levels here are symmetric and spaced like squares, see
    `mpicomp.kernels.cpu.quadratic_levels`. No block of values loses more energy than it has.
    """

    family: ClassVar[str] = "sparsifier"
    message: ClassVar[str] = "sparse"

    wire: str | None = field(default=None, kw_only=True)
    indices: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        check_choice(self.id, "wire", self.wire, VALUES)
        check_choice(self.id, "indices", self.indices, ("auto", *INDICES))
        if self.selects_by_ratio:
            self._set(ratio=check_ratio(self.id, getattr(self, "ratio", None)))

    feedback = True  # a selection by magnitude is biased

    def count(self, numel: int) -> int | None:
        """Return the number of elements selected out of ``numel``; None where the values decide it."""
        return None

    def expected(self, numel: int) -> int:
        return self.count(numel) or num_kept(getattr(self, "ratio", 0.01), numel)

    def wire_for(self, count: int, numel: int) -> Wire:
        """Return the storage format for ``count`` elements of ``numel``, the same on all ranks: only shapes decide."""
        return Wire(self.wire, compact(count, numel) if self.indices == "auto" else self.indices)

    def message_bytes(self, count: int, numel: int, dtype: np.dtype[Any]) -> int:
        """Return the length of a message with ``count`` elements of ``numel``."""
        return sparse_bytes(count, numel, dtype, self.wire_for(count, numel))

    def wire_bytes_per_element(self, itemsize: int) -> float:
        numel = 1 << 20
        count = self.expected(numel)
        coded = self.wire_for(count, numel).indices != "plain"
        indices = sizes.index_bytes(count, numel) if coded else 4 * count
        return (indices + value_bytes(count, np.dtype(f"f{itemsize}"), self.wire)) / numel

    @abstractmethod
    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        """Choose the elements that are sent.

        Parameters
        ----------
        accumulated : Accumulated
            Gradient plus residual; ``accumulated.array()`` is the plain array. Not empty.
        context : Context
            Step, seed, this bucket's memory, and a workspace for arrays that are needed at every step.

        Returns
        -------
        Selection
            Valid until the next call for the same bucket.
        """

    def select_packed(self, accumulated: Accumulated, context: Context) -> PackedSelection | None:
        """Select on a device, with the message of the selection; None where that is impossible."""
        return None


@dataclass(frozen=True, repr=False)
class SharedSparsifier(Sparsifier):
    """A sparsifier that sends the same elements on all ranks, so that no index travels and values can be summed.

    To add one: derive from it and implement `positions`, and `count` unless a field ``ratio`` sets it. Every
    collective that sums dense arrays carries it.

    Parameters
    ----------
    wire : {None, "fp16", "bf16", "q8"}
        Format of values; the 16-bit forms are summed in at least float32, as those of `mpicomp.Dense` are; ``"q8"``
        travels as `mpicomp.MaxNorm` packs an array, in 8 bits a value.
    """

    shares_positions: ClassVar[bool] = True
    indices: ClassVar[str] = "plain"  # type: ignore[misc]  # no parameter: none travels

    by_magnitude = False

    def __post_init__(self) -> None:
        check_choice(self.id, "wire", self.wire, (None, "fp16", "bf16", "q8"))
        super().__post_init__()

    def wire_bytes_per_element(self, itemsize: int) -> float:
        return self.count(1 << 20) / (1 << 20) * {None: itemsize, "q8": 1}.get(self.wire, 2)

    def count(self, numel: int) -> int:
        """Return the number of elements sent out of ``numel``."""
        return num_kept(getattr(self, "ratio", 1.0), numel)

    @abstractmethod
    def positions(self, numel: int, context: Context, out: NDArray[np.uint32]) -> None:
        """Write ``count(numel)`` positions, ascending without repetition, the same on all ranks.

        They may depend on the seed, the step and the bucket, as ``context.random(shared=True)`` does.
        """

    def drawn(self, numel: int, context: Context) -> NDArray[np.uint32]:
        """Return the `positions` of this step where the bucket is; valid until the next call."""
        workspace, count = context.workspace, self.count(numel)
        drawn: NDArray[np.uint32] = workspace.host_array("shared.drawn", count, np.uint32)
        self.positions(numel, context, drawn)
        if workspace.device.number is None:
            return drawn
        indices: NDArray[np.uint32] = workspace.array("shared.indices", count, np.uint32)
        workspace.device.assign(indices, drawn)
        return indices

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        """Return the elements at the positions of this step; valid until the next call."""
        indices = self.drawn(accumulated.numel, context)
        values = context.workspace.array("shared.values", indices.size, accumulated.dtype)
        accumulated.kernels.gather(accumulated.array(), indices, values)
        return Selection(indices, values)


@dataclass(frozen=True, repr=False)
class Quantiser(Compressor):
    """A compressor that sends every element, in few bits.

    To add one: derive from it and implement `packed_bytes`, `pack`, `unpack` and `unpack_add`. The message depends on
    the array alone, and its length on the array's.
    """

    family: ClassVar[str] = "quantiser"
    message: ClassVar[str] = "packed"
    parts: tuple[tuple[int, "Quantiser"], ...] = bound(())
    """Elements and quantiser of each part of a bucket, if its parts are packed separately; see `packers`."""

    @property
    def feedback(self) -> bool:
        return True

    @property
    def packs_in_place(self) -> bool:
        """Whether it has a `pack_in_place`, which saves sweeps."""
        return False

    def wire_bytes_per_element(self, itemsize: int) -> float:
        return self.packed_bytes(1 << 20) / (1 << 20)

    @abstractmethod
    def packed_bytes(self, numel: int) -> int:
        """Return the number of bytes that ``numel`` elements are packed into: a multiple of 8; 0 for none."""

    def check_length(self, message: Bytes, numel: int) -> None:
        """Raise `MessageError` for a message that is not as long as that of ``numel`` elements, before it is read."""
        if message.size != self.packed_bytes(numel):
            raise MessageError(
                f"{self.id}: {numel} elements are packed into {self.packed_bytes(numel)} bytes, got {message.size}"
            )

    @abstractmethod
    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        """Pack an array.

        Parameters
        ----------
        array : array, shape (n,)
            float32 or float64, read-only; it may be empty.
        message : array of uint8, shape (packed_bytes(n),)
            Receives the message; aligned to 8 bytes. All of it is written to.
        sent : array, shape (n,)
            Receives the values that `unpack` reads, bit for bit. If ``array`` has NaN or infinity, so has ``sent``.
        key : int
            64 bits, different for each call: the source of all random choices.

        Returns
        -------
        float
            Squared L2 norm of ``array - sent``; NaN or infinite if an element is.
        """

    @abstractmethod
    def unpack(self, message: Bytes, out: Floats) -> None:
        """Write the packed values to an array of the same length and dtype; refuse messages by `check_length`."""

    def pack_in_place(self, accumulated: Accumulated, place: slice, message: Bytes, key: int) -> float:
        """Compute a part of a sum, pack it as `pack` does, and leave its error in its place."""
        raise NotImplementedError(f"{self.id}: does not pack in place")

    @abstractmethod
    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        """Add ``factor`` times the packed values to an array of the same length and dtype."""

    def unpack_add_all(self, messages: Bytes, place: slice, factor: float, out: Floats) -> None:
        """Add ``factor`` times the values packed in the bytes ``place`` of each row of ``messages``, in order."""
        for message in messages:
            self.unpack_add(message[place], factor, out)

    def unpack_sum(self, messages: Bytes, place: slice, factor: float, out: Floats) -> None:
        """Write the sum of `unpack_add_all`."""
        out.fill(0)
        self.unpack_add_all(messages, place, factor, out)


class Packer:
    """Packs one piece of a bucket, whose parts (elements, quantiser) follow each other, as a `Quantiser` does."""

    def __init__(self, parts: Sequence[tuple[int, Quantiser]]) -> None:
        self._parts: list[tuple[Quantiser, slice, slice]] = []
        start = self.packed_bytes = 0
        for size, quantiser in parts:
            stop, end = start + size, self.packed_bytes + quantiser.packed_bytes(size)
            self._parts.append((quantiser, slice(start, stop), slice(self.packed_bytes, end)))
            start, self.packed_bytes = stop, end
        self.numel = start
        self.packs_in_place = all(quantiser.packs_in_place for _, quantiser in parts)

    @functools.cached_property
    def pieces(self) -> "list[tuple[slice, slice, int, Packer]]":
        """Packers of runs of about `PIECE_NUMEL` elements: elements, bytes, number of the first part, packer."""
        pieces, run = [], list[tuple[int, Quantiser]]()
        first = start = place = size = 0
        for number, (quantiser, part, packed) in enumerate(self._parts, 1):
            run.append((part.stop - part.start, quantiser))
            size += part.stop - part.start
            if size >= PIECE_NUMEL or number == len(self._parts):
                packer = Packer(run)
                pieces.append((slice(start, start + size), slice(place, packed.stop), first, packer))
                run, first, start, place, size = [], number, part.stop, packed.stop, 0
        return pieces

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        """Pack the piece as `Quantiser.pack` does."""
        lost: list[float] = []
        for number, (quantiser, part, packed) in enumerate(self._parts):
            lost.append(quantiser.pack(array[part], message[packed], sent[part], key + number & LARGEST_KEY))
        return sum_numbers(lost)

    def pack_in_place(self, accumulated: Accumulated, start: int, message: Bytes, key: int) -> float:
        """Pack the piece of a sum that begins at ``start`` as `Quantiser.pack_in_place` does."""
        lost: list[float] = []
        for number, (quantiser, part, packed) in enumerate(self._parts):
            place = slice(start + part.start, start + part.stop)
            lost.append(quantiser.pack_in_place(accumulated, place, message[packed], key + number & LARGEST_KEY))
        return sum_numbers(lost)

    def unpack(self, message: Bytes, out: Floats) -> None:
        """Write the packed values."""
        for quantiser, part, packed in self._parts:
            quantiser.unpack(message[packed], out[part])

    def unpack_add_all(self, messages: Bytes, start: int, factor: float, out: Floats) -> None:
        """Add ``factor`` times the packed values of each row of ``messages``, which begin at the byte ``start``."""
        for quantiser, part, packed in self._parts:
            quantiser.unpack_add_all(messages, slice(start + packed.start, start + packed.stop), factor, out[part])

    def unpack_sum(self, messages: Bytes, start: int, factor: float, out: Floats) -> None:
        """Write the sum of ``factor`` times the packed values of each row of ``messages``."""
        for quantiser, part, packed in self._parts:
            quantiser.unpack_sum(messages, slice(start + packed.start, start + packed.stop), factor, out[part])


def _cut(quantiser: Quantiser, size: int) -> list[tuple[int, Quantiser]]:
    grid = getattr(quantiser, "bucket", None) or getattr(quantiser, "block", None)
    if grid is None or PIECE_NUMEL % grid:  # a grid reaches across
        return [(size, quantiser)]
    whole, rest = divmod(size, PIECE_NUMEL)
    return [(PIECE_NUMEL, quantiser)] * whole + [(rest, quantiser)] * (rest > 0 or not size)


def sum_numbers(numbers: list[float]) -> float:
    """Return the sum of numbers; on a device that of one is no launch."""
    return sum(numbers[1:], numbers[0]) if numbers else 0.0


def packers(compressor: Quantiser, sizes: Sequence[int]) -> list[Packer]:
    """Return the packer of each piece of an array; parts that ``compressor`` is bound to are packed separately."""
    if sum(size for size, _ in compressor.parts) != sum(sizes):
        known = {size: Packer(_cut(compressor, size)) for size in set(sizes)}
        return [known[size] for size in sizes]
    left = list(reversed(compressor.parts))
    made = []
    for size in sizes:
        inside: list[tuple[int, Quantiser]] = []
        while size:
            whole, quantiser = left.pop()
            taken = min(size, whole)
            if taken:
                inside.append((taken, quantiser))
            if taken < whole:
                left.append((whole - taken, quantiser))
            size -= taken
        made.append(Packer(inside))
    return made
