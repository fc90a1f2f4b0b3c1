"""The end of a rank: it completes rounds that nobody waits for, and leaves once all other ranks leave, too.

MPI's own end waits for all ranks as well, but without a word, and a rank that still waits for this one would do so
forever. Here the others learn of it, so that such a rank ends the job; see `mpicomp.mpi.watchdog`.

Where a rank of the job has died, none that has a transport comes to MPI's own end, even if it had nothing to do with
the dead one. That end has a barrier of Open MPI's launcher, which may last forever where a process ends without it at
about that time, as those do that have gone on without the dead one.
"""

import atexit
import contextlib
import logging
import os
import sys
import time
from typing import Any

from mpi4py import MPI

from mpicomp.errors import RankFailedError
from mpicomp.job import abort
from mpicomp.mpi.failures import all_end, fault_tolerant
from mpicomp.mpi.pool import Pool, pools
from mpicomp.mpi.thread import leave_all
from mpicomp.mpi.transport import SHORTEST_S, Naps
from mpicomp.mpi.watchdog import lookout

_LAST_ROUNDS_S = 3.0  # seconds that rounds may take which nobody has waited for
_LONGEST_NAP_S = 0.01  # seconds; others may compute for hours, and perhaps on this rank's core

_finalize = MPI.Finalize
_all_came: bool | None = None  # whether all ranks have come to their end alive; None until that was asked
_process = os.getpid()  # a forked child, which runs the same exit handlers, must not call MPI


def leave() -> None:
    """Leave the exchange for good. A second call does nothing. It comes back when all ranks leave."""
    mine = list(pools.values())
    if os.getpid() != _process or MPI.Is_finalized() or all(pool.over for pool in mine):
        return
    if abort.leaves_alone or (abort.ranks_died and abort.status != 0):
        abort.end_job(abort.status)  # once the others know that this rank leaves, they end with their own status
    for pool in mine:
        pool.over = True
        if pool.deaths is not None:
            pool.deaths.stop()
    leave_all()
    lookout.stop()
    deadline, naps = time.monotonic() + _LAST_ROUNDS_S, Naps()
    while not _progress(mine) and time.monotonic() < deadline:
        naps.rest()
    watches = [pool.watch for pool in mine if pool.watch is not None]
    for watch in watches:
        watch.leave()
    nap = SHORTEST_S
    while not all(watch.alone for watch in watches):
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)
        for watch in watches:
            watch.look()
    abort.ranks_died |= any(watch.failed for watch in watches)


def _progress(mine: list[Pool]) -> bool:
    """Move on the rounds of all pools, and return whether none is left."""
    try:
        return False not in [pool.progress() for pool in mine]
    except RankFailedError:  # they never end
        return True


def install() -> None:
    """Have this done before the end of MPI, whether the program or Python calls for it. A second call does nothing."""
    if MPI.Finalize is _finalize:
        atexit.register(_end)
        atexit.register(leave)  # comes before it
        MPI.Finalize = _finalize_after_leaving


def _finalize_after_leaving() -> Any:
    """Call mpi4py's function of this name, when all ranks are there."""
    leave()
    return _finalize() if _all_ranks_came() else None


def _all_ranks_came() -> bool:
    """Return whether all ranks have come here alive, after a wait, unless this rank knows of a death."""
    global _all_came
    if abort.ranks_died:
        return False
    if _all_came is None:
        _all_came = not fault_tolerant() or all_end(Naps(longest=_LONGEST_NAP_S))
    return _all_came


def _end() -> None:
    """End this process where a rank has died: MPI's own end, which comes last, may wait forever."""
    if os.getpid() == _process and abort.running() is not None and not _all_ranks_came():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(abort.status)
