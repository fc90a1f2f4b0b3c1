"""The ranks and links that are simulated."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpicomp.cost import Network
from mpicomp.cost.network_model import OPERATIONS
from mpicomp.errors import ConfigurationError
from mpicomp.rounds import ACROSS, HOST, WORLD, Group


@dataclass(frozen=True)
class Links:
    """Links between hosts, where they are not those that were measured."""

    # Of a host's link, as a message between two ranks sees it; None stands for what was measured
    seconds_per_byte: float | None = None
    latency: float | None = None
    # Seconds a byte of the switch that joins all hosts, of which those that send at a time get an even share; None for
    # one that is as fast as all links together
    switch: float | None = None


class Topology:
    """Ranks on hosts, as many on each but the last, and the network between them."""

    def __init__(
        self, ranks: int, per_host: int, measured: Network, measured_ranks: int, links: Links | None = None
    ) -> None:
        links = links or Links()
        self.ranks, self.per_host = ranks, min(per_host, ranks)
        self.hosts = -(-ranks // self.per_host)
        self.notes: list[str] = []
        self._layout = tuple(rank // self.per_host for rank in range(ranks))
        self._on_last = ranks - (self.hosts - 1) * self.per_host
        self.network = Network.from_json(measured.to_json() | {"hosts": self.hosts})
        if self.hosts > 1:
            self._between_hosts(measured, measured_ranks, links)
        self._fold(measured.hosts if measured.hosts > 1 else measured_ranks)
        if self.hosts > 1 and links.switch is not None:
            self._through_switch(links.switch / self.network.seconds_per_byte)
        if self.per_host > 1 and measured.hosts == measured_ranks > 1:
            self.notes.append("links inside a host were not measured; they are taken for a usual machine's")

    def _fold(self, measured: int) -> None:
        """Remove from Allreduce's factors the part that the measured number of hosts explains, see `folding`."""
        owed, here = folding(measured), folding(self.hosts if self.hosts > 1 else self.ranks)
        for group in (WORLD, ACROSS):
            latency, volume = self.network.factors(group, "allreduce")
            if owed > 1 and volume > math.sqrt(owed):  # nearer to that of a library that folds than to 1
                self.network.set_factors(group, "allreduce", latency, volume * here / owed, 0.1)

    def _between_hosts(self, measured: Network, measured_ranks: int, links: Links) -> None:
        if measured.hosts == 1:
            if links.latency is None or links.seconds_per_byte is None:
                raise ConfigurationError(
                    f"simulate: the cost model was measured on one host, and {self.ranks} ranks are on {self.hosts}; "
                    "name --bandwidth and --latency of the links between them"
                )
            self.notes.append("links between hosts were not measured: operations are taken to use them in full")
            for group in (WORLD, ACROSS):
                for operation in OPERATIONS:
                    self.network.set_factors(group, operation, 1.0, 1.0, 0.1)
        elif measured.hosts == measured_ranks:  # a rank a host: all groups were groups across hosts
            for operation in OPERATIONS:
                self.network.set_factors(ACROSS, operation, *measured.factors(WORLD, operation), 0.1)
        latency = self.network.latency if links.latency is None else links.latency
        per_byte = self.network.seconds_per_byte if links.seconds_per_byte is None else links.seconds_per_byte
        self.network.set_link(WORLD, latency, per_byte, 0.1)

    def _through_switch(self, slowness: float) -> None:
        """Slow down the operations for which the switch is slower than the links that send at a time."""
        hosts = self.hosts
        sending = dict.fromkeys(OPERATIONS, float(hosts))
        sending |= {"gatherv": 1.0, "bcast": (hosts - 1) / min(math.log2(hosts), 2 * (hosts - 1) / hosts)}
        for group in (WORLD, ACROSS):
            for operation, at_a_time in sending.items():
                latency, volume = self.network.factors(group, operation)
                self.network.set_factors(group, operation, latency, volume * max(1.0, at_a_time * slowness), 0.1)

    def group(self, rank: int) -> Group:
        """Return the group of all ranks as one of them sees it, as `mpicomp.rounds.layout_groups` does."""
        host, place = divmod(rank, self.per_host)
        on_host = self.per_host if host < self.hosts - 1 else self._on_last
        owners = self._on_last if self.hosts > 1 else on_host
        parts = [Group(place, on_host, True, HOST)]
        if place < owners:
            parts.append(Group(host, self.hosts, True, ACROSS, self.hosts, owners))
        return Group(rank, self.ranks, True, WORLD, self.hosts, self.per_host, tuple(parts), self._layout)

    def ranks_of(self, hosts: Iterable[int]) -> list[int]:
        return [
            rank for host in hosts for rank in range(host * self.per_host, min((host + 1) * self.per_host, self.ranks))
        ]

    def some_hosts(self, most: int) -> list[int]:
        """Return up to so many hosts: the first, the last, and others evenly between them."""
        if most >= self.hosts:
            return list(range(self.hosts))
        if most == 1:
            return [0]
        return sorted({round(place * (self.hosts - 1) / (most - 1)) for place in range(most)})


def folding(ranks: int) -> float:
    """Return how many times more bytes an Allreduce takes where ranks are no power of two.

    In Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521), ranks beyond the
    largest power of two send their arrays to partners first, and get the sum at the end.

    >>> folding(4), folding(3)
    (1.0, 2.25)
    """
    if ranks < 2:
        return 1.0
    core = 1 << (ranks.bit_length() - 1)
    passed = 2 * (core - 1) / core + (2 if ranks > core else 0)
    return passed / (2 * (ranks - 1) / ranks)
