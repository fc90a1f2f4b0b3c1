"""Whether hosts know each other's names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from mpicomp.doctor.ranks import Rank
from mpicomp.system.launcher import Problem

_LIMIT_S = 5.0  # seconds for looking up names: a resolver without a server answers after a minute


def resolves(name: str) -> bool:
    """Return whether a host name has an address here, within some seconds."""
    found: list[object] = []

    def look() -> None:
        try:
            found.extend(socket.getaddrinfo(name, None))
        except OSError:
            return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return bool(found)


def name_notes(ranks: Sequence[Rank]) -> list[Problem]:
    """Notice names that have no address on some host."""
    seen: dict[str, Rank] = {}
    for rank in ranks:
        for name in rank.unresolved:
            seen.setdefault(name, rank)
    return [
        Problem(
            f"the node name {name} does not resolve on {rank.host}: launchers that go by names cannot reach it",
            f"getent hosts {name}; put it with its address into DNS or /etc/hosts of every node",
        )
        for name, rank in seen.items()
    ]
