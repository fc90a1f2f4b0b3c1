"""A thread that ends the job when a rank of this host has died and MPI does not report it.

Open MPI 5.0.11 sometimes loses the notice when two ranks die within milliseconds of each other; the others then wait
inside an MPI call that never returns. The thread reads ``/proc`` and makes no MPI call, since Open MPI's agreement
breaks when another thread moves messages. It acts only while this rank waits, and MPI has `GRACE_S` seconds to report.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpicomp.system import abort

GRACE_S = 30.0  # an agreement after a reported death takes less, on a machine with many ranks a core, too
_PERIOD_S = 1.0
_START_FIELD = 19  # of /proc/PID/stat, counted after the command's closing bracket: clock ticks from boot to its start


class Process(NamedTuple):
    """A process of this host; its start tells it from a later one with the same number."""

    pid: int
    start: int


def running_process(pid: int) -> Process:
    """Return a process as it runs now; its start is -1 if it has ended or is out of sight."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Process(pid, -1)
    return Process(pid, -1 if state in "ZX" else int(fields[_START_FIELD - 1]))


class UnreportedDeaths:
    """Watches the processes of other ranks on this host."""

    def __init__(self, rank: int, peers: Mapping[int, Process], waits: Callable[[], bool]) -> None:
        self._rank = rank
        self._peers = {name: peer for name, peer in peers.items() if running_process(peer.pid) == peer}
        self._waits = waits
        self._stopping = threading.Event()
        if self._peers:
            threading.Thread(target=self._run, name="mpicomp deaths", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer: these ranks leave, or MPI has reported a death."""
        self._stopping.set()

    def _run(self) -> None:
        waited_since = None
        while not self._stopping.wait(_PERIOD_S):
            dead = [name for name, peer in self._peers.items() if running_process(peer.pid) != peer]
            if not dead or not self._waits():
                waited_since = None
            elif waited_since is None:
                waited_since = time.monotonic()
            elif time.monotonic() - waited_since > GRACE_S:
                names = ", ".join(map(str, dead))
                print(
                    f"mpicomp: rank {self._rank} waits, rank {names} of this host has died, and MPI has not reported "
                    f"it for {GRACE_S:g} s; ending the job: start it again from its last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                abort.end_job(1)
