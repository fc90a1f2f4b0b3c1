"""Rounds over MPI, one after the other.

Only buffer operations are used, on communicators that are duplicated once, so that no other traffic can meet ours.
Importing this module imports mpi4py.MPI, which starts MPI.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from mpicomp import abort, launcher
from mpicomp.collectives.round import ACROSS, HOST, WORLD, Group, layout_groups
from mpicomp.errors import LaunchError
from mpicomp.transport.base import Transport
from mpicomp.transport.mpi_lane import MPILane
from mpicomp.transport.mpi_layout import cores_of_a_rank, hosts_of_ranks, sums_are_identical, takes_naps
from mpicomp.transport.mpi_rounds import Channel
from mpicomp.transport.mpi_watch import make_watch

COUNT_LIMIT = 2**31 - 1
"""Largest count, displacement and number of bytes that is handed to MPI in one call."""


class MPITransport(MPILane):
    """One rank of an MPI communicator.

    Collective over the communicator.

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
    """

    def __init__(
        self, comm: MPI.Comm | None = None, count_limit: int = COUNT_LIMIT, layout: Sequence[int] | None = None
    ) -> None:
        abort.install()
        if comm is None:
            _check_launch()
        found = (MPI.COMM_WORLD if comm is None else comm).Dup()
        hosts = hosts_of_ranks(found)
        cores = cores_of_a_rank(found, hosts)
        naps = takes_naps(found, cores)
        group, members = layout_groups(hosts if layout is None else layout, found.rank)
        front, back = (_channels(world, group, members, count_limit) for world in (found, found.Dup()))
        super().__init__(group, front, back, naps, make_watch(found))
        self.cores = cores
        self._members = members
        self._limit = count_limit
        self.group = self._with_sums()

    def lanes(self, count: int) -> list[Transport]:
        """See `Transport.lanes`."""
        world = self._front[WORLD].comm
        made: list[Transport] = []
        for _ in range(count):
            # A lane never blocks, so that what it begins in one order may be under way together.
            channels = _channels(world.Dup(), self.group, self._members, self._limit)
            made.append(MPILane(self.group, channels, channels, self._naps, self.watch))
        return made

    def close(self) -> None:
        """See `MPILane.close`."""
        super().close()
        if self.watch is not None and not MPI.Is_finalized():
            self.watch.close()
        self.watch = None

    def _with_sums(self) -> Group:
        """Give the group with what is found out about sums, the same for all groups of a name. Collective."""
        names = (WORLD, HOST, ACROSS) if _is_split(self.group) else (WORLD,)
        mine = [n not in self._front or sums_are_identical(self._front[n].comm, self._naps) for n in names]
        everyones = np.empty(len(names), np.int32)
        self._front[WORLD].comm.Allreduce(np.array(mine, np.int32), everyones, MPI.MIN)
        identical = dict(zip(names, everyones.astype(bool).tolist(), strict=True))
        parts = (replace(p, identical_sums=identical.get(p.name, identical[WORLD])) for p in self.group.parts)
        return replace(self.group, identical_sums=identical[WORLD], parts=tuple(parts))


def _is_split(group: Group) -> bool:
    """Tell whether some group of a host, or across hosts, is neither all ranks nor one alone."""
    return 1 < group.hosts < group.size


def _channels(world: MPI.Comm, group: Group, members: dict[str, tuple[int, ...]], limit: int) -> dict[str, Channel]:
    """Give the channel of each group that this rank is in; groups of the same ranks share one. Collective."""
    whole = Channel(world, limit)
    if not _is_split(group):
        alone = Channel(MPI.COMM_SELF, limit)
        one = group.hosts == 1
        return {WORLD: whole, HOST: whole if one else alone, ACROSS: alone if one else whole}
    channels = {WORLD: whole}
    for name in (HOST, ACROSS):
        color = members[name][0] if name in members else MPI.UNDEFINED
        comm = world.Split(color, world.rank)
        if name in members:
            channels[name] = Channel(comm, limit)
    return channels


def _check_launch() -> None:
    vendor = "openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich"
    problem = launcher.singletons(None, MPI.COMM_WORLD.size, vendor)
    if problem is not None:
        raise LaunchError(f"mpi: {problem.what}; start it with: {problem.fix}")
