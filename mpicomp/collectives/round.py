"""Rounds: what a scheme asks of the transport, and the group of ranks that it asks it for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.graph import Graph

WORLD, HOST, ACROSS = "world", "host", "across"
"""Names of groups: all ranks; those of one host; those with the same place on their hosts, one a host."""


@dataclass(frozen=True)
class Group:
    """Some ranks, as one of them sees them.

    Parameters
    ----------
    rank, size : int
        This rank's place, and how many there are.
    identical_sums : bool
        Whether the transport's sum has the same bits on every rank.
    name : str
        Which ranks: `WORLD`, `HOST` or `ACROSS`.
    hosts : int
        On how many hosts they are.
    sharing : int
        How many ranks of one host send through its link at a time when groups of this name are at work: for `WORLD`
        the most ranks that a host has, for `ACROSS` the fewest.
    parts : tuple of Group
        The `HOST` group that this rank is in, and its `ACROSS` group if it is in one. They may be left out where
        every rank has a host of its own, or all are on one.
    layout : tuple of int
        The host of each rank, by number; it may be left out where the parts may.
    """

    rank: int
    size: int
    identical_sums: bool = True
    name: str = WORLD
    hosts: int = 1
    sharing: int = 1
    parts: tuple["Group", ...] = ()
    layout: tuple[int, ...] = ()

    def seen_by(self, rank: int) -> "Group":
        """Give this group of all ranks as another rank sees it."""
        if self.layout:
            return layout_groups(self.layout, rank, self.identical_sums)[0]
        return replace(self, rank=rank)

    def part(self, name: str) -> "Group | None":
        """Give this rank's group of a name, None where it is in none.

        As many ranks of each host are in `ACROSS` groups as the host with the fewest has.
        """
        if name == self.name:
            return self
        for part in self.parts:
            if part.name == name:
                return part
        if self.parts:
            return None
        whole = replace(self, name=name)
        alone = Group(0, 1, name=name)
        return whole if (name == HOST) == (self.hosts == 1) else alone


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
        Whether the transport only starts the round: it answers with a `Pending`, which whoever asked yields later
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
        """Tell whether it is done, and move it on; once True, ``task.recv`` is filled. Not collective."""


def layout_groups(
    layout: Sequence[int], rank: int, identical_sums: bool = True
) -> tuple[Group, dict[str, tuple[int, ...]]]:
    """Give the group of all ranks, as one of them sees it, and who is in its groups.

    Parameters
    ----------
    layout : sequence of int
        The host of each rank, by number.
    rank : int
        Which rank looks.
    identical_sums : bool
        See `Group`.

    Returns
    -------
    Group
        With its parts.
    dict of str to tuple of int
        The ranks in each group that this rank is in, ascending; one's place is that in its group.

    Examples
    --------
    >>> group, members = layout_groups([0, 0, 1, 1, 1], rank=2)
    >>> members["host"], members["across"]
    ((2, 3, 4), (0, 2))
    >>> group.hosts, group.sharing, group.part("across").rank
    (2, 3, 1)
    >>> layout_groups([0, 0, 1, 1, 1], rank=4)[0].part("across") is None
    True
    """
    on_host = {host: [other for other, where in enumerate(layout) if where == host] for host in dict.fromkeys(layout)}
    owners = min(len(ranks) for ranks in on_host.values())
    own = on_host[layout[rank]]
    place = own.index(rank)
    members = {WORLD: tuple(range(len(layout))), HOST: tuple(own)}
    parts = [Group(place, len(own), identical_sums, HOST)]
    if place < owners:
        members[ACROSS] = tuple(sorted(ranks[place] for ranks in on_host.values()))
        across = members[ACROSS]
        parts.append(Group(across.index(rank), len(across), identical_sums, ACROSS, len(on_host), owners))
    most = max(len(ranks) for ranks in on_host.values())
    world = Group(rank, len(layout), identical_sums, WORLD, len(on_host), most, tuple(parts), tuple(layout))
    return world, members


def dense_ring_bytes(numel: int, ranks: int, itemsize: int = 4) -> float:
    """Bytes that leave a rank when a dense array is averaged by a ring: the yardstick for all others.

    Examples
    --------
    >>> dense_ring_bytes(1000, 4)
    6000.0
    """
    return 2 * (ranks - 1) / ranks * numel * itemsize


def parts_of(numel: int, size: int) -> list[int]:
    """Cut ``numel`` elements into ``size`` parts that differ by at most one element.

    Examples
    --------
    >>> parts_of(10, 4), parts_of(1, 3)
    ([3, 3, 2, 2], [1, 0, 0])
    """
    least, more = divmod(numel, size)
    return [least + (rank < more) for rank in range(size)]
