"""The communication that a scheme asks for: groups of ranks, rounds, generators that yield them. No MPI."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpicomp.errors import MessageError, RankFailedError

Value = TypeVar("Value")

_BYTE, _LENGTH = np.dtype(np.uint8), np.dtype(np.int64)
MIN_SHARED = 1 << 15
"""Elements from which on ranks that share memory sum an array in it: shorter ones gain nothing."""
FLAGS = 3
"""Numbers that ranks sum with an array in shared memory."""
_MAX_BYTES = 1 << 28  # of an object: some hundred for each of a million parameters
WORLD, HOST, ACROSS = "world", "host", "across"
"""Names of groups: all ranks; those of one host; one rank a host, with the same place on each."""


@dataclass(frozen=True)
class Group:
    """Some ranks, as one of them sees them.

    Parameters
    ----------
    rank, size : int
        This rank's place, and the number of ranks.
    identical_sums : bool
        Whether the transport's sum has the same bits on every rank.
    name : str
        `WORLD`, `HOST` or `ACROSS`.
    hosts : int
        Number of their hosts.
    sharing : int
        Number of ranks of a host that send through its link at a time in rounds of groups of this name: for `WORLD` the
        most ranks of a host, for `ACROSS` the fewest.
    parts : tuple of Group
        This rank's `HOST` group, and its `ACROSS` group if it is in one. Optional if each rank has its own host, or all
        are on one.
    layout : tuple of int
        The number of each rank's host; optional if the parts are.
    own_cores : bool
        Whether each rank has a core of its own, so that it waits inside MPI; the same on all ranks.
    shares_memory : bool
        Whether the ranks of a group of one host sum long arrays in memory that they share; the same on all ranks.
    """

    rank: int
    size: int
    identical_sums: bool = True
    name: str = WORLD
    hosts: int = 1
    sharing: int = 1
    parts: tuple["Group", ...] = ()
    layout: tuple[int, ...] = ()
    own_cores: bool = True
    shares_memory: bool = False

    def seen_by(self, rank: int) -> "Group":
        """Return this group of all ranks as another rank sees it."""
        if self.layout:
            group, _ = layout_groups(self.layout, rank, self.identical_sums)
            return replace(group, own_cores=self.own_cores, shares_memory=self.shares_memory)
        return replace(self, rank=rank)

    def part(self, name: str) -> "Group | None":
        """Return this rank's group of a name, or None; of each host as many ranks are in `ACROSS` groups."""
        if name == self.name:
            return self
        for part in self.parts:
            if part.name == name:
                return part
        if self.parts:
            return None
        return replace(self, name=name) if (name == HOST) == (self.hosts == 1) else Group(0, 1, name=name)


def layout_groups(
    layout: Sequence[int], rank: int, identical_sums: bool = True
) -> tuple[Group, dict[str, tuple[int, ...]]]:
    """Return the group of all ranks, as one rank sees it, and the ranks in each of its groups, ascending.

    >>> group, members = layout_groups([0, 0, 1, 1, 1], rank=2)
    >>> members["host"], members["across"]
    ((2, 3, 4), (0, 2))
    >>> group.hosts, group.sharing, group.part("across").rank
    (2, 3, 1)
    >>> layout_groups([0, 0, 1, 1, 1], rank=4)[0].part("across") is None
    True
    """
    on_host: dict[int, list[int]] = {}
    for other, host in enumerate(layout):
        on_host.setdefault(host, []).append(other)
    owners = min(len(ranks) for ranks in on_host.values())
    neighbours = on_host[layout[rank]]
    place = neighbours.index(rank)
    members = {WORLD: tuple(range(len(layout))), HOST: tuple(neighbours)}
    parts = [Group(place, len(neighbours), identical_sums, HOST)]
    if place < owners:
        members[ACROSS] = tuple(sorted(ranks[place] for ranks in on_host.values()))
        across = members[ACROSS]
        parts.append(Group(across.index(rank), len(across), identical_sums, ACROSS, len(on_host), owners))
    most = max(len(ranks) for ranks in on_host.values())
    world = Group(rank, len(layout), identical_sums, WORLD, len(on_host), most, tuple(parts), tuple(layout))
    return world, members


def parts_of(numel: int, size: int) -> list[int]:
    """Cut ``numel`` elements into ``size`` parts that differ by at most one element.

    >>> parts_of(10, 4), parts_of(1, 3)
    ([3, 3, 2, 2], [1, 0, 0])
    """
    least, more = divmod(numel, size)
    return [least + 1] * more + [least] * (size - more)


@dataclass
class Round:
    """One communication step of all ranks of a group; without arrays, its shape.

    Parameters
    ----------
    operation : {"allreduce", "allgatherv", "alltoallv", "bcast", "gatherv", "sendrecv"}
        ``allreduce`` sums ``send`` over ranks into ``recv``.
        ``allgatherv`` writes the ranks' ``send`` one after the other to ``recv``.
        ``alltoallv`` cuts ``send`` in parts, part j for rank j; ``recv`` holds this rank's part from every rank.
        ``bcast`` copies the root's ``send`` to ``recv`` on all ranks.
        ``gatherv`` writes the ranks' ``send`` one after the other to the root's ``recv``; others need no ``recv``.
        ``sendrecv`` sends ``send`` to one rank and receives ``recv`` from one.
    counts : sequence of int
        Elements, which may be 0. ``allreduce`` and ``bcast``: one number. ``allgatherv`` and ``gatherv``: of each rank,
        known to all. ``alltoallv``: of each part of ``send``. ``sendrecv``: sent and received, 0 without a peer.
    dtype : numpy.dtype
        Of the elements.
    root : int
        Of a ``bcast`` or ``gatherv``.
    send, recv : arrays, optional
        Contiguous; they do not overlap.
    group : str
        Name of its group, see `Group.part`.
    peers : tuple of int or None
        ``sendrecv``: the receiver of ``send`` and the sender of ``recv``, or None.
    received : sequence of int, optional
        ``alltoallv``: the length of the part from each rank. None: all ranks have the same ``counts``.
    arrived : callable, optional
        ``sendrecv``: called with start and stop of every part of ``recv`` when it has arrived, in any order.
    background : bool
        Whether the transport only starts the round: it replies with a `Pending`, which the caller yields later
        to get ``recv``. Until then ``send`` and ``recv`` are the transport's.
    once : bool
        Whether it runs once: its bytes belong to no step, and are counted separately.
    factor : float
        ``allreduce``: of the sum. Only where ranks of a group share memory.
    flags : array of float64, optional
        ``allreduce``: `FLAGS` numbers that are summed, too, in place. Only with a factor.
    """

    operation: str
    counts: Sequence[int]
    dtype: np.dtype[Any]
    root: int = 0
    send: NDArray[Any] | None = None
    recv: NDArray[Any] | None = None
    group: str = WORLD
    peers: tuple[int | None, int | None] = (None, None)
    received: Sequence[int] | None = None
    arrived: Callable[[int, int], None] | None = None
    background: bool = False
    once: bool = False
    factor: float = 1.0
    flags: NDArray[np.float64] | None = None
    finite: bool | None = field(default=None, init=False, compare=False)
    """``allreduce``: whether every element of the result is a finite number; None where that was not seen."""
    calls_made: tuple[Any, ...] | None = field(default=None, init=False, repr=False, compare=False)
    """MPI's calls, kept by the transport for a round that is yielded again with the same arrays and counts."""

    @property
    def lends_device_memory(self) -> bool:
        """Whether an array is not the host's."""
        send, recv = self.send, self.recv
        return not ((send is None or isinstance(send, np.ndarray)) and (recv is None or isinstance(recv, np.ndarray)))

    def sent_bytes(self, group: Group) -> int:
        """Return the payload in bytes that this rank sends; ``group`` is the round's."""
        if group.size == 1:
            return 0
        match self.operation:
            case "allgatherv":
                elements = self.counts[group.rank]
            case "gatherv":
                elements = self.counts[group.rank] if group.rank != self.root else 0
            case "alltoallv":
                elements = sum(self.counts) - self.counts[group.rank]
            case "bcast":
                elements = self.counts[0] if group.rank == self.root else 0
            case _:
                elements = self.counts[0]
        return elements * self.dtype.itemsize

    def shape(self) -> "Round":
        """Return the round without arrays."""
        return replace(self, send=None, recv=None, arrived=None, flags=None)

    def buffer_bytes(self, group: Group) -> int:
        """Return the bytes of ``send`` and ``recv`` together, on the rank where they are most."""
        match self.operation:
            case "allgatherv" | "gatherv":
                elements = max(self.counts) + sum(self.counts)
            case "alltoallv":
                elements = sum(self.counts) + max(self.counts) * group.size
            case "sendrecv":
                elements = sum(self.counts)
            case _:
                elements = 2 * self.counts[0]
        return elements * self.dtype.itemsize

    def wire_bytes(self, group: Group) -> float:
        """Return the bytes that leave this rank.

        An allreduce counts as a ring, which sends 2 (N-1)/N of the array; an allgather as a ring, in which a rank sends
        every part but its right neighbour's; a broadcast as the received bytes, shared evenly: (N-1)/N of the array.
        """
        size = group.size
        match self.operation:
            case "allgatherv":
                elements: float = sum(self.counts) - self.counts[(group.rank + 1) % size]
            case "bcast":
                elements = self.counts[0] * (size - 1) / size
            case "allreduce":
                elements = 2 * self.counts[0] * (size - 1) / size
            case _:
                return self.sent_bytes(group)
        return elements * self.dtype.itemsize if size > 1 else 0.0


class Pending(ABC):
    """A round under way."""

    task: Round

    @abstractmethod
    def test(self) -> bool:
        """Advance it and return whether it is done; then ``task.recv`` is filled. Not collective."""


Request = Round | Pending
"""A generator yields a round to run or start, or a started round to wait for."""

Rounds = Generator[Request, Any, Value]
"""A generator that yields requests, is sent their results, and returns a value."""


def gather_rows(values: ArrayLike, group: Group) -> Rounds[NDArray[Any]]:
    """Return the values of all ranks, shape (ranks, ...), from values of one shape and dtype."""
    array = np.asarray(values)
    send = np.ascontiguousarray(array).reshape(-1)
    recv = np.empty(group.size * send.size, send.dtype)
    rows: NDArray[Any] = yield Round("allgatherv", [send.size] * group.size, send.dtype, send=send, recv=recv)
    return rows.reshape(group.size, *array.shape)


def dense_ring_bytes(numel: int, ranks: int, itemsize: int = 4) -> float:
    """Return the bytes that leave a rank when a ring averages a dense array: the reference for all others.

    >>> dense_ring_bytes(1000, 4)
    6000.0
    """
    return 2 * (ranks - 1) / ranks * numel * itemsize


@dataclass(frozen=True)
class Returned(Generic[Value]):
    """The end of a generator, with its return value."""

    value: Value


def advance(exchange: Rounds[Value], reply: Any = None) -> Request | Returned[Value]:
    """Advance a generator to its next round with a reply, None at first; a `RankFailedError` is raised in it."""
    try:
        return exchange.throw(reply) if isinstance(reply, RankFailedError) else exchange.send(reply)
    except StopIteration as stop:
        return Returned(stop.value)


def observe(
    exchange: Rounds[Value],
    before: Callable[[Request], None] | None = None,
    after: Callable[[Request], None] | None = None,
) -> Rounds[Value]:
    """Forward a generator's rounds, with a call before and after each. As rounds."""
    reply: Any = None
    while not isinstance(request := advance(exchange, reply), Returned):
        if before is not None:
            before(request)
        reply = yield request
        if after is not None:
            after(request)
    return request.value


def from_one(content: dict[str, Any] | None, group: Group, subsystem: str, root: int = 0) -> Rounds[dict[str, Any]]:
    """Return the root's JSON-able object on all ranks, or raise `MessageError` in a caller's name. As rounds."""
    send = np.frombuffer(json.dumps(content).encode(), _BYTE) if group.rank == root else None
    length = None if send is None else np.array([send.size], _LENGTH)
    lengths = yield Round("bcast", (1,), _LENGTH, root=root, send=length, recv=np.empty(1, _LENGTH))
    [size] = checked_lengths(lengths, subsystem)
    arrived = yield Round("bcast", (size,), _BYTE, root=root, send=send, recv=np.empty(size, _BYTE))
    return read_object(arrived, subsystem, root)


def checked_lengths(lengths: NDArray[np.int64], subsystem: str) -> list[int]:
    """Return the bytes of each rank's object, before memory is allocated for them."""
    checked = [int(length) for length in lengths]
    for length in checked:
        if not 0 <= length <= _MAX_BYTES:
            raise MessageError(f"{subsystem}: a report must have from 0 to {_MAX_BYTES} bytes, got {length}")
    return checked


def read_object(arrived: NDArray[np.uint8], subsystem: str, rank: int) -> dict[str, Any]:
    """Return the object in a rank's report."""
    try:
        content = json.loads(arrived.tobytes())
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{subsystem}: from rank {rank}: a report is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise MessageError(f"{subsystem}: from rank {rank}: a report must be an object, got {content!r:.100}")
    return content
