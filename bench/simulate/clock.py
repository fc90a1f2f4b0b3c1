"""Rounds under a clock: the seconds that a scheme's rounds take some ranks.

One of the ranks that do the same stands for all of them. All are at the same round, and the seconds of the slowest one
are those of all: a rank that is ahead waits for the others, as in every exchange that delivers the same mean to all. Of
a library's operation a few ranks stand for all, and of rounds with partners all ranks of a few hosts, which share the
hosts' links.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import Scheme
from mpicomp.cost import Terms
from mpicomp.cost.formulas import slowest, terms
from mpicomp.cost.network_model import GROUPS, OPERATIONS, add_terms
from mpicomp.rounds import ACROSS, HOST, WORLD, Group, Round

_LATER = 1 << 30  # number of a step in the long run: first steps may have other rounds
_ROUNDS = 1 << 12  # that are looked at, with partners: of as many hosts as have no more, of one at least
_HOSTS = 2  # that are looked at where no rank has a partner: the first one, and the last, which may have fewer ranks
_WINDOW = 2  # rounds in the background that are under way at a time

_COEFFICIENTS = 2 * len(GROUPS) * len(OPERATIONS)


@dataclass(frozen=True)
class _Rank:
    """A rank that is looked at: its host, its groups, and its rounds by the group whose they are."""

    host: int
    view: Group
    rounds: dict[str, list[Round]]


@dataclass(frozen=True)
class _Message:
    """Seconds of the slowest message of a round: until it begins to arrive, and on the link."""

    latency: float = 0.0
    volume: float = 0.0


class Clock:
    """Predicts the seconds of schemes among the ranks of a topology."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._units: dict[tuple[str, str], tuple[float, float]] = {}

    def seconds(self, scheme: Scheme[Any], numel: int, dtype: np.dtype[Any], most: float = math.inf) -> float:
        """Return the seconds of a scheme's rounds for an array, without computation; infinity above ``most``."""
        if self._topology.ranks == 1:
            return 0.0
        ranks = self._look(scheme, numel, dtype, most)
        if not ranks:
            return math.inf
        now = busy = alone = 0.0  # now; when the link is free; when the last operation in the background ends
        under_way: deque[float] = deque()
        for place in _places(ranks):
            met = [
                (rank, rank.rounds[place[0]][place[1]])
                for rank in ranks
                if len(rank.rounds.get(place[0], ())) > place[1]
            ]
            task = met[0][1]
            if not task.background:
                now = max(now, busy, alone, *under_way)
                under_way.clear()
                now += self._together(met) if task.operation != "sendrecv" else _whole(self._message(met))
            elif task.operation != "sendrecv":
                alone = max(alone, now + self._together(met))
            else:
                if len(under_way) == _WINDOW:
                    now = max(now, under_way.popleft())
                message = self._message(met)
                busy = max(now, busy) + message.volume
                under_way.append(busy + message.latency)
        return max(now, busy, alone, *under_way)

    def _look(self, scheme: Scheme[Any], numel: int, dtype: np.dtype[Any], most: float) -> list[_Rank]:
        """Return the ranks that stand for all; none where the first one alone takes more than ``most``."""
        topology = self._topology
        first = scheme.rounds(numel, dtype, topology.group(0), _LATER)
        hops = sum(task.peers != (None, None) and not task.background for task in first)
        names = (WORLD, ACROSS) if topology.per_host == 1 else (WORLD, ACROSS, HOST)
        if most < hops * min(self._unit("sendrecv", name)[0] for name in names):
            return []
        hosts = _HOSTS
        if any(task.operation == "sendrecv" for task in first):
            hosts = max(1, _ROUNDS // (len(first) * topology.per_host))
        ranks = []
        for rank in topology.ranks_of(topology.some_hosts(hosts)):
            view = topology.group(rank)
            rounds: dict[str, list[Round]] = {}
            for task in first if rank == 0 else scheme.rounds(numel, dtype, view, _LATER):
                rounds.setdefault(task.group, []).append(task)
            ranks.append(_Rank(rank // topology.per_host, view, rounds))
        return ranks

    def _together(self, met: Sequence[tuple[_Rank, Round]]) -> float:
        """Return the seconds of an operation of all ranks of a group, the slowest one's."""
        name, operation = met[0][1].group, met[0][1].operation
        costs = []
        for rank, task in met:
            group = rank.view.part(name)
            if group is not None:
                costs.append(terms(task, group))
        cost = slowest(costs)
        return cost.seconds(*self._unit(operation, name))

    def _message(self, met: Sequence[tuple[_Rank, Round]]) -> _Message:
        """Return the seconds of the slowest message that ranks send each other; a host's ranks share its link."""
        leaving: Counter[int] = Counter()
        coming: Counter[int] = Counter()
        legs = []
        for rank, task in met:
            for direction, (peer, count) in enumerate(zip(task.peers, task.counts, strict=True)):
                if peer is not None:
                    across = self._crosses(rank, task.group, peer)
                    legs.append((rank.host, direction, across, count * task.dtype.itemsize))
                    if across:
                        (coming if direction else leaving)[rank.host] += 1
        name = met[0][1].group
        latency = volume = 0.0
        for host, direction, across, nbytes in legs:
            units = self._unit("sendrecv", name if across or self._topology.hosts == 1 else HOST)
            sharing = (coming if direction else leaving)[host] if across else 1
            latency, volume = max(latency, units[0]), max(volume, nbytes * units[1] * sharing)
        return _Message(latency, volume)

    def _crosses(self, rank: _Rank, name: str, peer: int) -> bool:
        if name == ACROSS:
            return True
        return name != HOST and peer // self._topology.per_host != rank.host

    def _unit(self, operation: str, name: str) -> tuple[float, float]:
        """Return the seconds of an operation's latency, and of a byte of it, in a group."""
        if (operation, name) not in self._units:
            pair = []
            for term in (Terms(1, 0), Terms(0, 1)):
                coefficients = np.zeros(_COEFFICIENTS)
                add_terms(coefficients, operation, name, term)
                pair.append(self._topology.network.seconds(coefficients))
            self._units[operation, name] = pair[0], pair[1]
        return self._units[operation, name]


def _places(ranks: Sequence[_Rank]) -> list[tuple[str, int]]:
    """Return the rounds of the rank that has most, each by its group and its number among that group's."""
    longest = max(ranks, key=lambda rank: sum(map(len, rank.rounds.values())))
    return [(name, place) for name, rounds in longest.rounds.items() for place in range(len(rounds))]


def _whole(message: _Message) -> float:
    return message.latency + message.volume
