"""Measurements that the ranks make together: the link between them, and the difference of their clocks."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

from mpicomp.system.launcher import Problem

_LOOKS = 8  # measurements of the link; the first is left out, and the median of the others counts
_WALL_S = 1.0  # seconds by which wall clocks may differ: timestamps of files and logs are in seconds


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth between neighbouring ranks while all of them send.

    Parameters
    ----------
    between
        ``"hosts"``, or ``"ranks"`` of the one host.
    latency_s, bytes_per_s
        Of the slowest link, one way.
    """

    between: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Clocks:
    """The difference of the hosts' clocks.

    Parameters
    ----------
    error_s
        Error in seconds with which the ranks' steady clocks can be compared: times of different hosts are no more
        exact.
    wall_difference_s
        Largest difference of the hosts' wall clocks.
    """

    error_s: float
    wall_difference_s: float


def measure(comm: Any) -> tuple[Link | None, Clocks]:
    """Compare clocks, and measure the link as a cost model does where it has changed. Collective; some milliseconds.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Of several ranks.

    Returns
    -------
    Link or None
        None with ``MPICOMP_PROBE=0``, on rank 0.
    Clocks
    """
    from mpicomp.cost import Network, probe_link
    from mpicomp.transport.clocks import compare_clocks
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport(comm)
    try:
        error = transport.run(compare_clocks(transport))
        hosts = transport.group.hosts
        link = None
        if comm.bcast(os.environ.get("MPICOMP_PROBE", "1")) != "0":
            network, seen = Network(hosts), []
            for _ in range(_LOOKS):
                transport.run(probe_link(network, transport))
                seen.append((network.latency, network.seconds_per_byte))
            # The first look opens the connections. Ranks that do not start together make one look slow, another fast.
            latency, seconds_per_byte = (statistics.median(numbers) for numbers in zip(*seen[1:], strict=True))
            link = Link("hosts" if hosts > 1 else "ranks", latency, 1 / seconds_per_byte)
        layout = transport.group.layout
        walls = comm.allgather(time.time() - transport.clock())
        # Ranks of one host have one clock, and what they read differs by what came in between.
        firsts = [walls[layout.index(host)] for host in set(layout)]
        return link, Clocks(error, max(firsts) - min(firsts))
    finally:
        transport.close()


def clock_notes(clocks: Clocks) -> list[Problem]:
    """Notice wall clocks that differ."""
    if clocks.wall_difference_s <= _WALL_S + clocks.error_s:
        return []
    return [
        Problem(
            f"wall clocks of the hosts differ by {clocks.wall_difference_s:.1f} s: times of files and logs do not fit",
            "chronyc tracking on every host, and ask your administrators to run chronyd",
        )
    ]
