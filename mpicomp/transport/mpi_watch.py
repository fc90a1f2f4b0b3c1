"""Who is missing, where some ranks have waited for others for a long time.

MPI says nothing about a rank that never comes: the others wait, and nobody knows for whom. Ranks that have waited for
long tell all others so, in messages that nobody waits for; who has not said so is missing. A thread does this beside
whatever waits.

``MPICOMP_STALL`` sets the seconds, 60 if it is not set; 0 turns it off. Nothing is ended: a rank may have a reason.
"""

import atexit
import os
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomp.errors import ConfigurationError

_SECONDS = 60.0
_PARTS = 8  # of these seconds between two looks, and for others' messages to arrive
_LONGEST_S = 5.0

_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()
_thread: threading.Thread | None = None
_stopping = threading.Event()
_one_at_a_time = threading.Lock()  # whoever makes or frees a watch, and the thread that goes through them


class Watch:
    """What one rank's transport waits for.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Of all ranks, nobody else's; freed by `close`.
    seconds : float
        After which a rank says that it waits.
    """

    def __init__(self, comm: MPI.Comm, seconds: float) -> None:
        self.about = ""
        """What the rounds are for, to be printed."""
        self._comm = comm
        self._seconds = seconds
        self._patience_s = seconds / 2  # others began to wait later, by what they computed meanwhile
        self._since: dict[Any, tuple[float, str]] = {}
        self._said = False
        self._shown = False
        self._said_at = 0.0
        self._waiting: set[int] = set()
        self._says = 0
        self._heard = np.zeros(comm.size, np.int64)  # messages of each rank
        self._sent: list[tuple[MPI.Request, Any]] = []
        with _one_at_a_time:
            _watches.add(self)
        _start(seconds / _PARTS)

    def begin(self, what: Any, operation: str) -> None:
        """Note that something has begun to wait."""
        self._since[what] = time.monotonic(), operation

    def end(self, what: Any) -> None:
        """Note that it waits no longer."""
        self._since.pop(what, None)

    def look(self) -> None:
        """Hear who waits, say so if this rank does, and print who is missing. Called by the thread."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, 0, status):
            self._hear(status.Get_source())
        self._sent = [(request, told) for request, told in self._sent if not request.Test()]
        oldest = min(list(self._since.values()), default=None)
        waits = oldest is not None and time.monotonic() - oldest[0] > self._seconds
        if waits != self._said:
            self._say(waits)
        elif oldest is not None and waits and not self._shown and time.monotonic() - self._said_at > self._patience_s:
            self._show(*oldest)

    def close(self) -> None:
        """Let go of the communicator. Collective."""
        with _one_at_a_time:
            _watches.discard(self)
        # What is not received would be found by whoever gets this communicator's number next.
        says = np.empty(self._comm.size, np.int64)
        self._comm.Allgather(np.array([self._says]), says)
        for other in range(self._comm.size):
            while other != self._comm.rank and self._heard[other] < says[other]:
                self._hear(other)
        MPI.Request.Waitall([request for request, _ in self._sent])
        self._sent.clear()
        self._comm.Free()

    def _hear(self, other: int) -> None:
        told = np.empty(1, np.int32)
        self._comm.Recv(told, other, 0)
        self._heard[other] += 1
        (self._waiting.add if told[0] else self._waiting.discard)(other)

    def _say(self, waits: bool) -> None:
        told = np.array([waits], np.int32)
        self._says += 1
        for other in range(self._comm.size):
            if other != self._comm.rank:
                self._sent.append((self._comm.Isend(told, other, 0), told))
        self._said, self._said_at, self._shown = waits, time.monotonic(), False

    def _show(self, began: float, operation: str) -> None:
        self._shown = True
        waiting = sorted(self._waiting | {self._comm.rank})
        missing = [rank for rank in range(self._comm.size) if rank not in waiting]
        if waiting[0] != self._comm.rank:
            return  # one of them is enough
        doing = f" of {self.about}" if self.about else ""
        who = f"{_ranks(missing)} not there" if missing else "all ranks wait, but not for the same"
        print(
            f"mpicomp: rank {waiting[0]} has waited for {time.monotonic() - began:.0f} s in an {operation}{doing}: "
            f"{who}. All ranks have to make the same calls in the same order; py-spy dump --pid shows where one is. "
            "MPICOMP_STALL=0 turns this off",
            file=sys.stderr,
            flush=True,
        )


def make_watch(comm: MPI.Comm) -> Watch | None:
    """Give a watch for the ranks of a communicator, which is duplicated; None where it is off or cannot be. Collective.

    Raises
    ------
    ConfigurationError
        On all ranks, where rank 0's ``MPICOMP_STALL`` is no number of seconds.
    """
    told = np.array([_wanted_seconds() if comm.rank == 0 else 0.0])
    comm.Bcast(told, 0)
    seconds = float(told[0])
    if seconds < 0:
        raise ConfigurationError(
            "mpi: MPICOMP_STALL must be a number of seconds, or 0 for never, and on rank 0 it is not"
        )
    if seconds == 0 or comm.size == 1 or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return None
    return Watch(comm.Dup(), seconds)


def _wanted_seconds() -> float:
    """Give rank 0's seconds, -1 where they are none."""
    said = os.environ.get("MPICOMP_STALL")
    if not said:
        return _SECONDS
    try:
        seconds = float(said)
    except ValueError:
        return -1.0
    return seconds if 0 <= seconds < float("inf") else -1.0


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {listed} is" if len(ranks) == 1 else f"ranks {listed} are"


def _start(period_s: float) -> None:
    global _thread
    if _thread is None:
        _thread = threading.Thread(
            target=_look_now_and_then, args=(min(period_s, _LONGEST_S),), name="mpicomp watch", daemon=True
        )
        _thread.start()


def _look_now_and_then(period_s: float) -> None:
    while not _stopping.wait(period_s):
        with _one_at_a_time:
            for watch in list(_watches):
                watch.look()


@atexit.register
def _stop() -> None:
    """Come before the end of MPI."""
    _stopping.set()
    if _thread is not None:
        _thread.join()
