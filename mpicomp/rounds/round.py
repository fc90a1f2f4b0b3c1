"""Rounds: the communication that a scheme requests from the transport."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpicomp.rounds.group import WORLD, Group

Value = TypeVar("Value")


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
        return replace(self, send=None, recv=None, arrived=None)

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
"""Values that a generator may yield: a round to run or start, or a started round to wait for."""

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
