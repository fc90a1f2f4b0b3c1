"""Layout of the ranks, found before the first round: hosts, cores, and whether sums are identical on all ranks."""

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpicomp.transport.naps import wait

_PROBE = 1 << 14  # elements of the sum whose bits are compared
_CORES = 1 << 12  # cores of one machine; those with higher numbers do not count


def hosts_of_ranks(comm: MPI.Comm) -> list[int]:
    """Return the host of each rank, numbered in the order in which they first appear. Collective."""
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([comm.rank], np.int64)
    shared.Bcast(first, 0)
    shared.Free()
    firsts = np.empty(comm.size, np.int64)
    comm.Allgather(first, firsts)
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(firsts.tolist()))}
    return [numbers[rank] for rank in firsts.tolist()]


def cores_of_a_rank(comm: MPI.Comm, hosts: Sequence[int]) -> float:
    """Return the cores for each rank on the host where they are fewest; the same on all ranks. Collective.

    Those count that some rank of a host may run on.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        All ranks.
    hosts : sequence of int
        The host of each rank.
    """
    mine = np.zeros(_CORES, np.bool_)
    mine[[core for core in os.sched_getaffinity(0) if core < _CORES]] = True
    everyones = np.empty((comm.size, _CORES // 8), np.uint8)
    comm.Allgather(np.packbits(mine), everyones)
    own = [everyones[np.array(hosts) == host] for host in set(hosts)]
    return float(min(np.unpackbits(np.bitwise_or.reduce(masks)).sum() / len(masks) for masks in own))


def takes_naps(comm: MPI.Comm, cores: float) -> bool:
    """Return whether ranks have to leave their core to others while they wait, the same on all ranks. Collective.

    ``MPICOMP_NAPS=0/1`` overrides what follows from the cores.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        All ranks.
    cores : float
        Of each rank.
    """
    said = os.environ.get("MPICOMP_NAPS")
    mine = cores < 1 if said not in ("0", "1") else said == "1"
    everyones = np.empty(1, np.int32)
    comm.Allreduce(np.array([mine], np.int32), everyones, MPI.MAX)
    return bool(everyones[0])


def sums_are_identical(comm: MPI.Comm, naps: bool) -> bool:
    """Sum numbers for which the order matters and compare the bits. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Whose sums; each communicator may have algorithms of its own.
    naps : bool
        Whether calls that block are not in use; they may have other algorithms than those that do not.
    """
    if comm.size <= 2:
        return True  # a + b is b + a
    numbers = np.random.default_rng(comm.rank).standard_normal(_PROBE).astype(np.float32)
    digests = []
    for size in (7, _PROBE):  # libraries take different paths for short and long messages
        sums = np.empty((2, size), np.float32)
        wait(comm.Iallreduce(numbers[:size], sums[0]).Test)
        if naps:
            sums[1] = sums[0]
        else:
            comm.Allreduce(numbers[:size], sums[1])
        digests.append(hashlib.blake2b(sums.tobytes(), digest_size=8).digest())
    mine = np.frombuffer(b"".join(digests), np.uint8)
    everyones = np.empty((comm.size, mine.size), np.uint8)
    comm.Allgather(mine, everyones)
    return bool((everyones == everyones[0]).all())
