"""The end of a rank: it tells the others, which may still wait for it, and leaves when all of them leave, too.

If a rank of the job has died, none that has a transport enters MPI's own end, even if it had nothing to do with the
dead one: a barrier of Open MPI's launcher there may last forever if a process ends without it at about that time.
"""

import atexit
import contextlib
import logging
import os
import sys
import time

from mpi4py import MPI

from mpicomp.errors import RankFailedError
from mpicomp.job import abort
from mpicomp.mpi.failures import all_end, fault_tolerant
from mpicomp.mpi.pool import pools
from mpicomp.mpi.thread import drivers
from mpicomp.mpi.transport import Backoff
from mpicomp.mpi.watcher import watcher

_LAST_ROUNDS_S = 3.0  # seconds that rounds may take that no caller has waited for
_MAX_SLEEP_S = 0.01  # others may compute for hours, and perhaps on this rank's core

_finalize = MPI.Finalize
_all_ended: bool | None = None  # whether all ranks have reached their end alive; None until that was asked
_process = os.getpid()  # a forked child, which runs the same exit handlers, must not call MPI


def leave() -> None:
    """Leave the exchange, and return when all ranks leave. A second call does nothing."""
    mine = list(pools.values())
    if os.getpid() != _process or MPI.Is_finalized() or all(pool.over for pool in mine):
        return
    if abort.leaves_alone or (abort.ranks_died and abort.status != 0):
        abort.end_job(abort.status)  # once the others know that this rank leaves, they end with their own status
    for pool in mine:
        pool.over = True
    for driver in list(drivers):
        driver.leave()
    watcher.stop()
    deadline, backoff = time.monotonic() + _LAST_ROUNDS_S, Backoff()
    # Rounds that a death has broken off never end.
    with contextlib.suppress(RankFailedError):
        while False in [pool.progress() for pool in mine] and time.monotonic() < deadline:
            backoff.rest()
    watchdogs = [pool.watchdog for pool in mine]
    for watchdog in watchdogs:
        watchdog.leave()
    backoff = Backoff(eager=0, longest=_MAX_SLEEP_S)
    while not all(watchdog.alone for watchdog in watchdogs):
        backoff.rest()
        for watchdog in watchdogs:
            watchdog.poll()
    abort.ranks_died |= any(watchdog.failed for watchdog in watchdogs)


def install() -> None:
    """Have `leave` called before MPI's end, by the program or at exit. A second call does nothing."""
    if MPI.Finalize is _finalize:
        atexit.register(_end)
        atexit.register(leave)  # runs before it
        MPI.Finalize = _finalize_after_leaving


def _finalize_after_leaving() -> None:
    leave()
    if _all_ranks_ended():
        _finalize()


def _all_ranks_ended() -> bool:
    global _all_ended
    if abort.ranks_died:
        return False
    if _all_ended is None:
        _all_ended = not fault_tolerant() or all_end(Backoff(longest=_MAX_SLEEP_S))
    return _all_ended


def _end() -> None:
    # MPI's own end, which is last, may wait forever if a rank has died.
    if os.getpid() == _process and abort.communicator_alive() is not None and not _all_ranks_ended():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(abort.status)
