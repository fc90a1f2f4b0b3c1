"""Alpha-beta costs of operations: latencies that are paid, and bytes that pass a link one after the other.

Formulas of Table I of Flexible Communication (Tyagi and Swany 2023, arXiv 2312.02493); logarithms are to the base 2.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpicomp.mpi.rounds import ACROSS, Group, Round


@dataclass(frozen=True)
class Terms:
    """A cost in units of a link: latencies, and bytes that pass it one after the other.

    >>> (Terms(3, 1e6) + Terms(3, 1e6)).seconds(latency=1e-3, seconds_per_byte=8e-9)
    0.022
    """

    latency: float  # number of latencies
    volume: float  # bytes

    def __add__(self, other: "Terms") -> "Terms":
        """Return the cost of both, one after the other."""
        return Terms(self.latency + other.latency, self.volume + other.volume)

    def seconds(self, latency: float, seconds_per_byte: float) -> float:
        """Return the seconds on a link."""
        return self.latency * latency + self.volume * seconds_per_byte


def ring(ranks: int, nbytes: float) -> Terms:
    """Return the cost of a sum by a ring: reduce-scatter and allgather between neighbors."""
    return Terms(2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes)


def tree(ranks: int, nbytes: float) -> Terms:
    """Return the cost of a sum by a tree: reduction and broadcast of the whole array."""
    return Terms(2 * math.log2(ranks), 2 * math.log2(ranks) * nbytes)


def broadcast(ranks: int, nbytes: float) -> Terms:
    """Return the cost of a broadcast by a binomial tree."""
    return Terms(math.log2(ranks), math.log2(ranks) * nbytes)


def allgather(ranks: int, nbytes: float) -> Terms:
    """Return the cost of an allgather of ``nbytes`` of every rank."""
    return Terms(math.log2(ranks), (ranks - 1) * nbytes)


def terms(task: Round, group: Group) -> Terms:
    """Return the cost of a round on one of its ranks; the round costs as much as on its slowest rank.

    A library is assumed to use the best algorithm for large arrays; the measured factor of each operation corrects
    that. Latencies of background rounds are hidden. With several ranks on a host the bytes are those on the host's
    link: libraries sum and broadcast inside a host first, and messages inside a host are left out.
    """
    size, rank = group.size, group.rank
    if size == 1:
        return Terms(0, 0)
    itemsize = task.dtype.itemsize
    depth = math.log2(size)
    ends = group.hosts if group.hosts > 1 else size  # of a ring: one rank a host talks to the next host
    match task.operation:
        case "allreduce":
            cost = Terms(2 * depth, 2 * (ends - 1) / ends * task.counts[0])
        case "allgatherv":
            cost = Terms(depth, sum(task.counts) - min(task.counts))
        case "gatherv":
            cost = Terms(depth, (sum(task.counts) - task.counts[task.root]) * _remote_share(group))
        case "bcast":
            cost = Terms(depth, min(math.log2(ends), 2 * (ends - 1) / ends) * task.counts[0])
        case "alltoallv":
            kept = task.counts[rank]
            received = kept * size if task.received is None else sum(task.received)
            cost = Terms(size - 1, (max(sum(task.counts), received) - kept) * _remote_share(group))
        case _:
            cost = Terms(float(task.peers != (None, None)), max(task.counts))
    latency = 0.0 if task.background else cost.latency
    return Terms(latency, cost.volume * itemsize * _senders_per_link(task, group))


def slowest(costs: Iterable[Terms]) -> Terms:
    """Return the cost of ranks that run at the same time."""
    costs = list(costs)
    return Terms(max(cost.latency for cost in costs), max(cost.volume for cost in costs))


def _remote_share(group: Group) -> float:
    if group.hosts in (1, group.size):
        return 1.0
    return (group.size - group.sharing) / (group.size - 1)


def _senders_per_link(task: Round, group: Group) -> int:
    if group.hosts == 1:
        return 1
    if group.name == ACROSS or task.operation == "alltoallv":
        return group.sharing
    if task.operation == "sendrecv":
        distances = [abs(peer - group.rank) for peer in task.peers if peer is not None]
        if any(1 < distance < group.size - 1 for distance in distances):  # no neighbor in a ring
            return group.sharing
    return 1
