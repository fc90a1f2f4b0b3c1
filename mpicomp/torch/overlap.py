"""A thread that exchanges gradients while backward goes on."""

import numpy as np
import torch

from mpicomp.errors import LaunchError, warn_user
from mpicomp.reducer import Reducer
from mpicomp.rounds import gather_rows
from mpicomp.transport.interleave import ProgressThread

_FLAG = np.dtype(np.uint8)


def overlap_thread(reducer: Reducer, wanted: bool | None) -> tuple[ProgressThread | None, bool]:
    """Return a thread that exchanges while backward goes on, or None, and whether some rank left that open. Collective.

    Parameters
    ----------
    reducer : Reducer
        The reducer whose exchanges are to overlap with backward.
    wanted : bool or None
        True wants it wherever there are others and MPI allows it. None does not where all ranks are on one host, so
        that nothing is waited for, and torch's threads take all of its cores. One rank that does not is enough.
    """
    transport = reducer.transport
    ranks = transport.group.size
    if ranks == 1:
        return None, wanted is None
    problem = None
    try:
        transport.check_threads(alone=False)
    except LaunchError as error:
        problem = error
    crowded = transport.group.hosts == 1 and transport.cores < torch.get_num_threads() + 1
    mine = np.array([problem is None, not crowded if wanted is None else wanted, wanted is None], _FLAG)
    everyones = transport.run(reducer.counted(gather_rows(mine, transport.group)))
    able, useful = (bool(flags.all()) for flags in everyones[:, :2].T)
    left_open = bool(everyones[:, 2].any())
    if able and useful:
        return ProgressThread(transport, lanes=1).start(), left_open
    if not able and useful and transport.group.rank == 0:
        warn_user(f"gradients are exchanged after backward, not during it: {problem}")
    return None, left_open
