"""The end of a rank: it completes rounds that nobody waits for, and leaves once all other ranks leave, too.

MPI's own end waits for all ranks as well, but without a word, and a rank that still waits for this one would do so
forever. Here the others are told, so that such a rank ends the job; see `mpicomp.transport.mpi_watch`.
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
from mpicomp.system import abort
from mpicomp.transport.interleave import leave_all
from mpicomp.transport.mpi_pool import Pool, pools
from mpicomp.transport.mpi_watch import lookout
from mpicomp.transport.naps import SHORTEST_S, Naps

_LAST_ROUNDS_S = 3.0  # seconds that rounds may take which nobody has waited for
_LONGEST_NAP_S = 0.01  # seconds; others may compute for hours, and perhaps on this rank's core

_finalize = MPI.Finalize
_process = os.getpid()  # a forked child, which runs the same exit handlers, must not call MPI


def leave() -> None:
    """Leave the exchange for good. A second call does nothing. It comes back when all ranks leave."""
    mine = list(pools.values())
    if os.getpid() != _process or MPI.Is_finalized() or all(pool.over for pool in mine):
        return
    if abort.ranks_died and abort.status != 0:
        abort.end_job(abort.status)  # once the others have heard that this rank leaves, they leave with success
    for pool in mine:
        pool.over = True
    leave_all()
    lookout.stop()
    deadline, naps = time.monotonic() + _LAST_ROUNDS_S, Naps()
    while not _settle(mine) and time.monotonic() < deadline:
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


def _settle(mine: list[Pool]) -> bool:
    """Move on the rounds of all pools, and return whether none is left."""
    try:
        return False not in [pool.settle() for pool in mine]
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
    return None if abort.ranks_died else _finalize()


def _end() -> None:
    """End this process where a rank has died: MPI's own end, which comes last, may wait for the dead one for ever."""
    if abort.ranks_died and os.getpid() == _process:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(abort.status)
