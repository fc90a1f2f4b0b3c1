"""Rounds over MPI, one after the other.

Only buffer operations are used, on communicators that are duplicated once, so that no other traffic can meet ours.
Importing this module imports mpi4py.MPI, which starts MPI, and sets the hooks that end the job when this rank fails.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from mpicomp.errors import LaunchError
from mpicomp.rounds import ACROSS, HOST, WORLD, Group
from mpicomp.system import abort, launcher
from mpicomp.transport import mpi_end
from mpicomp.transport.mpi_lane import MPILane
from mpicomp.transport.mpi_layout import cores_of_a_rank, hosts_of_ranks, sums_are_identical, takes_naps
from mpicomp.transport.mpi_pool import is_split, pool_of

COUNT_LIMIT = 2**31 - 1
"""Largest count, displacement and number of bytes that is handed to MPI in one call."""

abort.install()
mpi_end.install()


class MPITransport(MPILane):
    """One rank of an MPI communicator.

    Collective over the communicator; closing it is not.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        Duplicated; None stands for MPI.COMM_WORLD.
    count_limit : int
        Messages are cut so that no count exceeds it.
    layout : sequence of int, optional
        The host of each rank, by number, in place of what is found out: for tests of several hosts on one.

    Raises
    ------
    LaunchError
        Where a launcher started several processes that are all rank 0 of 1, and ``comm`` is None. Who wants
        that passes MPI.COMM_SELF.
    ConfigurationError
        On all ranks, where rank 0's ``MPICOMP_STALL`` is no number of seconds.
    """

    def __init__(
        self, comm: MPI.Comm | None = None, count_limit: int = COUNT_LIMIT, layout: Sequence[int] | None = None
    ) -> None:
        if comm is None:
            _check_launch()
        found = MPI.COMM_WORLD if comm is None else comm
        pool = pool_of(found, layout, count_limit)
        front, back = pool.take(found, 2)
        cores = cores_of_a_rank(found, hosts_of_ranks(found) if layout is not None else pool.hosts)
        naps = takes_naps(found, cores) or pool.thread_level < MPI.THREAD_MULTIPLE
        super().__init__(pool.group, pool, front, back, naps)
        self.cores = cores
        self.group = self._with_sums()

    def _with_sums(self) -> Group:
        """Give the group with what is found out about sums, the same for all groups of a name. Collective."""
        names = (WORLD, HOST, ACROSS) if is_split(self.group) else (WORLD,)
        mine = [n not in self._front or sums_are_identical(self._front[n].comm, self._naps) for n in names]
        everyones = np.empty(len(names), np.int32)
        self._front[WORLD].comm.Allreduce(np.array(mine, np.int32), everyones, MPI.MIN)
        identical = dict(zip(names, everyones.astype(bool).tolist(), strict=True))
        parts = (replace(p, identical_sums=identical.get(p.name, identical[WORLD])) for p in self.group.parts)
        return replace(self.group, identical_sums=identical[WORLD], parts=tuple(parts))


def _check_launch() -> None:
    vendor = "openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich"
    problem = launcher.singletons(None, MPI.COMM_WORLD.size, vendor)
    if problem is not None:
        raise LaunchError(f"mpi: {problem.what}; start it with: {problem.fix}")
