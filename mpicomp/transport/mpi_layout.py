"""What ranks find out about each other before the first round: hosts, cores, and whether sums are the same."""

import hashlib
import os

import numpy as np
from mpi4py import MPI

from mpicomp.transport.naps import wait

_PROBE = 1 << 14  # elements of the sum whose bits are compared


def hosts_of_ranks(comm: MPI.Comm) -> list[int]:
    """Give the host of each rank, numbered in the order in which they first appear. Collective."""
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([comm.rank], np.int64)
    shared.Bcast(first, 0)
    shared.Free()
    firsts = np.empty(comm.size, np.int64)
    comm.Allgather(first, firsts)
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(firsts.tolist()))}
    return [numbers[rank] for rank in firsts.tolist()]


def shares_cores(comm: MPI.Comm, neighbours: int) -> bool:
    """Tell whether some host has more ranks than cores, the same on all ranks. Collective.

    ``MPICOMP_NAPS=0/1`` overrides what is found.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        All ranks.
    neighbours : int
        How many of them are on this rank's host, itself included.
    """
    said = os.environ.get("MPICOMP_NAPS")
    mine = neighbours > len(os.sched_getaffinity(0)) if said not in ("0", "1") else said == "1"
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
