"""The base class of schemes: a scheme is a compressor bound to a collective, written as a generator of rounds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.wire import DAMAGED, NONFINITE, SHARING, STALE, Selection
from mpicomp.errors import MessageError
from mpicomp.gpu import current_device, received_on_host
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.registry import Registry
from mpicomp.workspace import Workspace

Exchange = Rounds["Result"]
"""Yields rounds, is sent their received arrays, and returns a `Result`."""

COUNT = np.dtype(np.int64)
_CANDIDATES = 5  # elements for each selected one that a compressor may list while it searches
_LATE_STEP = 1 << 30  # a step in the long run: first steps may have other rounds
_LARGEST = {np.dtype(dtype): float(np.finfo(dtype).max) for dtype in (np.float32, np.float64)}

MeanWriter = Callable[..., None]
"""Writes a mean to an array of shape (numel,), from messages that were checked before."""


@dataclass
class Result:
    """The result of an exchange: the mean, and this rank's share of it. All but ``sent`` is the same on every rank.

    Parameters
    ----------
    mean : array, shape (numel,), or function
        The same bits on every rank. A function writes it to an array, so that a step can choose memory that is free by
        then. It belongs to the workspace, and so do the messages that a function reads.
    sent : array or Selection
        This rank's share: the sum over ranks is ``ranks x mean``. A `Selection` is zero outside its indices.
        ``accumulated.array()`` itself stands for everything, or as `Accumulated.holds` defines.
    energy : float
        ``norm2(accumulated)``, the squared norm, summed over ranks.
    gain : float
        ``1 - norm2(accumulated - sent) / norm2(accumulated)``, squared norms summed over ranks; 1 where there
        was nothing to send.
    kept : float
        Kept elements of a rank, averaged over ranks.
    nonfinite, stale : bool
        Whether some rank held NaN or infinity; whether some rank asked for a new agreement.
    note : str
        Text that the record appends to the reason of the plan.
    problem : MessageError or None
        The message that this rank, and perhaps no other, could not read; apart from ``stale`` all other fields are then
        void. If the exchange is not stale, it was in the last message, and the others do not know of it.
    subtracts : bool
        Whether the function of the mean, called with ``sent`` and another array too, subtracts ``sent`` from that.
    """

    mean: NDArray[np.floating] | MeanWriter
    sent: NDArray[np.floating] | Selection
    energy: float
    gain: float
    kept: float
    nonfinite: bool
    stale: bool
    note: str = ""
    problem: MessageError | None = None
    subtracts: bool = False

    @classmethod
    def from_headers(
        cls,
        mean: NDArray[np.floating] | MeanWriter,
        sent: NDArray[np.floating] | Selection,
        kept: float,
        flags: int,
        energy: float,
        lost: float,
        finite: bool = True,
    ) -> "Result":
        """Return the result of an exchange whose messages have headers, from their flags and sums."""
        nonfinite, stale = bool(flags & NONFINITE) or not finite, bool(flags & STALE)
        return cls(mean, sent, energy, gain_of(lost, energy), kept, nonfinite, stale)

    @classmethod
    def from_trailer(
        cls,
        accumulated: Accumulated,
        mean: NDArray[np.floating],
        trailer: NDArray[np.floating],
        ranks: int,
        finite: bool | None = None,
    ) -> "Result":
        """Return the result of a dense sum of `Accumulated.with_trailer`, of which all was sent.

        ``trailer`` are its last numbers, summed over ranks; ``finite`` is whether the mean is, where that is known.
        """
        nonfinite, stale, energy, lost = received_on_host(trailer).tolist()
        if finite is None:
            finite = far_from_largest(energy * ranks, mean.dtype) or bool(np.isfinite(mean).all())
        gain = 1.0 if lost == 0 else gain_of(lost, energy)
        kept = float(accumulated.numel)
        return cls(mean, accumulated.whole, energy, gain, kept, nonfinite > 0 or not finite, stale > 0)

    def mean_array(
        self, accumulated: Accumulated, workspace: Workspace, name: str = "written mean"
    ) -> NDArray[np.floating]:
        """Return the mean as an array, in a workspace if it has to be written first."""
        if not callable(self.mean):
            return self.mean
        out: NDArray[np.floating] = workspace.array(name, accumulated.numel, accumulated.dtype)
        self.mean(out)
        return out


def mean_at(indices: NDArray[np.uint32], values: NDArray[np.floating]) -> MeanWriter:
    """Return the mean with values at some indices, and zeros elsewhere."""

    def write(out: NDArray[np.floating]) -> None:
        out.fill(0)
        kernels.scatter_add(indices, values, 1.0, out)

    return write


class Memory(NamedTuple):
    """Bytes that an exchange needs besides the gradient and the residual of its bucket, at most on any rank."""

    scratch: int
    """Until the exchange ends: the next one, of another bucket, takes the same."""
    held: int
    """Until the step ends, for each bucket."""


CompressorType = TypeVar("CompressorType", bound=Compressor)


class Scheme(ABC, Generic[CompressorType]):
    """A collective, one subclass in one file, with a compressor that fits it; it yields rounds and does no I/O."""

    kind: ClassVar[str] = "collective"
    id: ClassVar[str]
    """The name in the list of collectives."""
    precedence: ClassVar[int] = 50
    """The fitting collective with the lowest precedence is used before a measurement."""
    paper: ClassVar[str]
    """The paper that it comes from, and the deviations from it."""
    messages: ClassVar[str]
    """The kind of message that it carries, one of those of `Compressor.message`, or ``"any"``."""
    owner: ClassVar[type[Compressor]]
    """The compressor whose messages it alone carries, if ``messages`` is ``"own"``."""
    needs_whole_message: ClassVar[bool] = False
    """Whether a sparse message is read whole; where it is cut or summed, values cannot share scales (`SHARING`)."""
    sums_on_the_way: ClassVar[bool] = False
    """Whether several ranks sum a part one after the other: 16-bit wires are refused, which would round every time."""
    may_drop_selected: bool = False
    """Whether it delivers less than all that every rank's compressor has selected."""
    overwrites: ClassVar[bool] = False
    """Whether it calls `Accumulated.overwrite` where it may."""
    by_value: bool = False
    """Whether values decide how much travels, even of a compressor that selects a fixed number of elements."""

    def __init__(self, compressor: CompressorType) -> None:
        self.compressor = compressor

    @classmethod
    def supports(cls, compressor: type[Compressor] | Compressor) -> bool:
        """Return whether a compressor's messages fit; asked of a class, whether they do for some of its parameters."""
        if compressor.shares_positions:
            return False  # their values are carried as an array, see `bind`
        wire = getattr(compressor, "wire", None)
        if (wire in SHARING and not cls.needs_whole_message) or (wire is not None and cls.sums_on_the_way):
            return False
        if cls.messages == "own":
            return issubclass(compressor if isinstance(compressor, type) else type(compressor), cls.owner)
        return cls.messages in (compressor.message, "any")

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor | None:
        """Return the compressor of the inner collective, the constructor's second argument; None if there is none."""
        return None

    @abstractmethod
    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Return the shapes of the rounds for an array of ``numel`` elements, without arrays.

        Where the number of selected elements depends on the values, the expected number stands for it.
        """

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        """Return the bytes that `exchange` needs; by default those of the rounds' arrays, held, and of a selection."""
        selection = self.selection_memory(numel, dtype)
        return selection._replace(held=selection.held + self.buffer_bytes(numel, dtype, group))

    def buffer_bytes(self, numel: int, dtype: np.dtype[Any], group: Group) -> int:
        """Return the bytes of the arrays of all rounds, on the rank where they are most."""
        parts = ((task, group.part(task.group)) for task in self.rounds(numel, dtype, group, _LATE_STEP))
        return sum(task.buffer_bytes(part) for task, part in parts if part is not None)

    def selection_memory(self, numel: int, dtype: np.dtype[Any]) -> Memory:
        """Return the bytes of the compressor's selection, and of the candidates that it searches."""
        if self.compressor.family != "sparsifier":
            return Memory(0, 0)
        selected = self.compressor.expected(numel) * (4 + dtype.itemsize)
        return Memory(_CANDIDATES * selected, 2 * selected)

    @abstractmethod
    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Average over the ranks; see `Result`. ``accumulated`` is not empty.

        Raises
        ------
        MessageError
            On all ranks, where one of them could not read a message: that rank takes part to the end and sets a flag
            in its messages. Its own error has a cause, with the reason.
        """


def add_unless_zero(number: float, more: float) -> float:
    """Return the sum of a number that may be known on a device only, and one that often is 0."""
    return number + more if more != 0 else number


def failed_result(accumulated: Accumulated, problem: MessageError, stale: bool) -> Result:
    """Return the result of an exchange in which this rank could not read a message."""
    mean = current_device().zeros(accumulated.numel, accumulated.dtype)
    return Result(mean, accumulated.array(), accumulated.energy, math.nan, 0.0, False, stale, problem=problem)


def check_undamaged(collective: str, flags: int, problem: MessageError | None) -> None:
    """Raise on all ranks, at the end of an exchange, where some rank could not read a message."""
    if flags & DAMAGED:
        raise MessageError(f"{collective}: some rank was sent a damaged message") from problem


def check_counts(
    collective: str, counts: Iterable[int], least: int, most: int, sent: tuple[int, int] | None = None
) -> list[int]:
    """Return the ranks' counts, or raise on all ranks; ``sent`` is this rank's place among them and its count."""
    found = [int(count) for count in counts]
    wrong = next((place for place, count in enumerate(found) if not least <= count <= most), None)
    problem = None
    if wrong is not None:
        problem = f"from rank {wrong}: a number of elements must be from {least} to {most}, got {found[wrong]}"
    elif sent is not None and found[sent[0]] != sent[1]:
        problem = f"rank {sent[0]} has sent the number {sent[1]} and received {found[sent[0]]}"
    if problem is not None:
        raise MessageError(f"{collective}: a damaged number of elements") from MessageError(f"{collective}: {problem}")
    return found


def gather_counts(collective: str, count: int, numel: int, context: Context) -> Rounds[list[int]]:
    """Return the number of elements that each rank has selected; see `check_counts`."""
    group, recv = context.group, context.workspace.host_array("counts", context.group.size, COUNT)
    ask = Round("allgatherv", [1] * group.size, COUNT, send=np.array([count], COUNT), recv=recv)
    return check_counts(collective, (yield ask), 0, numel, (group.rank, count))


def cause_of(error: MessageError) -> MessageError | None:
    """Return the message error of this rank from an error that is raised on all ranks."""
    return error.__cause__ if isinstance(error.__cause__, MessageError) else None


def is_finite(mean: NDArray[np.floating], energy: float, ranks: int) -> bool:
    """Return whether all of a mean is finite; its elements are read only where the energy allows for others."""
    return far_from_largest(energy * ranks, mean.dtype) or bool(np.isfinite(mean).all())


def far_from_largest(energy: float, dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this squared norm stay far below the largest number of the dtype.

    A factor of 16 is left for sums of a few of them and for rounding. The squared norm of a sum over ranks is at most
    that of all ranks' arrays, times the ranks.

    >>> far_from_largest(1e74, np.dtype(np.float32)), far_from_largest(1e75, np.dtype(np.float32))
    (True, False)
    """
    return 16 * math.sqrt(energy) < _LARGEST[dtype] if energy >= 0 else False


def gain_of(lost: float, energy: float) -> float:
    """Return the retained share of energy: 1 where there was none or none was lost, NaN where it is unknown."""
    if energy == 0 or lost == 0:
        return 1.0
    return 1 - float(lost) / float(energy)


def slices_of(lengths: Sequence[int]) -> list[slice]:
    """Return the places of parts that lie one behind the other."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


COLLECTIVES: Registry[Scheme[Any]] = Registry("collective", ["mpicomp.collectives", "mpicomp.systems"])
