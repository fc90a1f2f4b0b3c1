"""Rounds: the communication that a scheme asks of the transport."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpicomp.rounds.graph import Graph
from mpicomp.rounds.group import WORLD, Group

Value = TypeVar("Value")


@dataclass
class Round:
    """One communication step of a group; without arrays it is only the shape of one.

    All ranks of the group take part in it.

    Parameters
    ----------
    operation : {"allreduce", "allgatherv", "alltoallv", "bcast", "gatherv", "sendrecv", "neighbor_alltoall"}
        ``allreduce`` sums ``send`` over ranks into ``recv``.
        ``allgatherv`` puts the ranks' ``send`` one after the other into ``recv``.
        ``alltoallv`` cuts ``send`` in parts, part j for rank j; ``recv`` holds this rank's part from every rank.
        ``bcast`` takes ``send`` from the root and puts it into ``recv`` on all ranks.
        ``gatherv`` puts the ranks' ``send`` one after the other into ``recv`` on the root; others need no ``recv``.
        ``sendrecv`` gives ``send`` to one rank and takes ``recv`` from one.
        ``neighbor_alltoall`` cuts ``send`` in as many parts of one length as this rank has neighbours in ``graph``,
        part j for the j-th of them; ``recv`` holds their parts for this rank, in the same order.
    counts : sequence of int
        Elements. ``allreduce`` and ``bcast``: one number. ``allgatherv`` and ``gatherv``: what each rank
        contributes, known to every rank. ``alltoallv``: the length of each part of ``send``. ``sendrecv``: what is
        sent and what is received, 0 where there is no peer. ``neighbor_alltoall``: one number, the length of a part.
        All may be 0.
    dtype : numpy.dtype
        Of the elements.
    root : int
        Of a ``bcast`` or ``gatherv``.
    send, recv : arrays, optional
        Contiguous; they do not overlap.
    group : str
        Whose round it is: a name from `Group.part`.
    peers : tuple of int or None
        ``sendrecv``: the rank that ``send`` goes to and the one that ``recv`` comes from, None for nobody.
    received : sequence of int, optional
        ``alltoallv``: the length of what comes from each rank. None: all ranks have the same ``counts``.
    arrived : callable, optional
        ``sendrecv``: called with the start and stop of every part of ``recv`` once it is there, in any order, so that
        it can be worked on while the rest is under way.
    graph : Graph, optional
        ``neighbor_alltoall``: who is whose neighbour in the group, the same on all ranks. A transport keeps what a
        graph needs, so a few graphs are used again and again.
    background : bool
        Whether the transport only starts the round: it answers with a `Pending`, which the caller yields later
        to get ``recv``. Until then ``send`` and ``recv`` are the transport's.
    once : bool
        Whether it is made once in a run: its bytes are no step's, and are counted apart.
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
    graph: Graph | None = None
    background: bool = False
    once: bool = False

    def sent_bytes(self, group: Group) -> int:
        """Bytes of payload that this rank hands to the transport for others; ``group`` is the round's own."""
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
            case "neighbor_alltoall":
                assert self.graph is not None
                elements = self.counts[0] * len(self.graph.neighbours(group.rank))
            case _:
                elements = self.counts[0]
        return elements * self.dtype.itemsize

    def wire_bytes(self, group: Group) -> float:
        """Bytes that leave this rank.

        An allreduce is counted as a ring or a reduce-scatter with an allgather, which send 2 (N-1)/N of the array; an
        allgather as a ring, in which a rank passes on every part but its right neighbour's. A broadcast
        is counted as what arrives, shared evenly: (N-1)/N of the array.
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
    """A round that was started and not waited for."""

    task: Round

    @abstractmethod
    def test(self) -> bool:
        """Return whether it is done, and move it on; once True, ``task.recv`` is filled. Not collective."""


Request = Round | Pending
"""Values that a generator may yield: a round to run or start, or a started round to wait for."""

Rounds = Generator[Request, Any, Value]
"""A generator that yields requests, is sent what they received, and returns a value."""


def gather_rows(values: ArrayLike, group: Group) -> Rounds[NDArray[Any]]:
    """Return the values of all ranks, shape (ranks, ...); shape and dtype are the same on all ranks."""
    array = np.asarray(values)
    send = np.ascontiguousarray(array).reshape(-1)
    recv = np.empty(group.size * send.size, send.dtype)
    rows: NDArray[Any] = yield Round("allgatherv", [send.size] * group.size, send.dtype, send=send, recv=recv)
    return rows.reshape(group.size, *array.shape)


def dense_ring_bytes(numel: int, ranks: int, itemsize: int = 4) -> float:
    """Bytes that leave a rank when a dense array is averaged by a ring: the yardstick for all others.

    Examples
    --------
    >>> dense_ring_bytes(1000, 4)
    6000.0
    """
    return 2 * (ranks - 1) / ranks * numel * itemsize
