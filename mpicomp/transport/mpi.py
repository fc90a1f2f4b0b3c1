"""Rounds over MPI, one after the other.

Only buffer operations are used, on a communicator that is duplicated once, so that no other traffic can meet ours.
Importing this module imports mpi4py.MPI, which starts MPI.

An MPI call that waits keeps its core busy. Where ranks have a core each that is the fastest way to wait; where
they share cores it takes them from the ranks that still compute, so there rounds are started without blocking
and asked for with naps in between.
"""

import functools
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpicomp import abort, launcher
from mpicomp.collectives.round import Group, Pending, Round
from mpicomp.errors import LaunchError
from mpicomp.transport.base import Transport

COUNT_LIMIT = 2**31 - 1
"""Largest count, displacement and number of bytes that is handed to MPI in one call."""

_PROBE = 1 << 14  # elements of the sum whose bits are compared at start
_EAGER = 200  # how often a rank that shares its core asks, yielding in between, before it naps
_NAP_S = (50e-6, 500e-6)  # naps grow from the first to the second


class MPITransport(Transport):
    """One rank of an MPI communicator.

    Collective over the communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        Duplicated; None stands for MPI.COMM_WORLD.
    count_limit : int
        Messages are cut so that no count exceeds it.

    Raises
    ------
    LaunchError
        Where a launcher started several processes that are all rank 0 of 1, and ``comm`` is None. Who wants
        that passes MPI.COMM_SELF.
    """

    def __init__(self, comm: MPI.Comm | None = None, count_limit: int = COUNT_LIMIT) -> None:
        super().__init__()
        abort.install()
        if comm is None:
            _check_launch()
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._limit = count_limit
        self._naps = self._shares_cores()
        self.group = Group(self._comm.rank, self._comm.size, self._sums_are_identical())

    def start(self, task: Round) -> Pending:
        """See `Transport.start`."""
        raise NotImplementedError

    def wait(self, pending: Pending) -> NDArray[Any]:
        """See `Transport.wait`."""
        raise NotImplementedError

    def perform(self, task: Round) -> NDArray[Any]:
        """See `Transport.perform`."""
        assert task.recv is not None
        getattr(self, f"_{task.operation}")(task.send, task.recv, task.counts, task.root)
        return task.recv

    def hosts(self) -> int:
        """See `Transport.hosts`."""
        shared = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        first = np.array([shared.rank == 0], np.int64)
        shared.Free()
        total = np.empty(1, np.int64)
        self._comm.Allreduce(first, total)
        return int(total[0])

    def close(self) -> None:
        """Free the duplicate. Collective over the communicator; a second call does nothing."""
        if self._comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._comm.Free()

    def _allreduce(self, send: NDArray[Any], recv: NDArray[Any], counts: Any, root: int) -> None:
        for part in self._cuts(recv):
            self._call("Allreduce", send[part], recv[part])

    def _bcast(self, send: NDArray[Any] | None, recv: NDArray[Any], counts: Any, root: int) -> None:
        if self._comm.rank == root:
            recv[:] = send
        for part in self._cuts(recv):
            self._call("Bcast", recv[part], root)

    def _allgatherv(self, send: NDArray[Any], recv: NDArray[Any], counts: Any, root: int) -> None:
        if recv.nbytes <= self._limit:
            if min(counts) == max(counts):
                self._call("Allgather", send, recv)
            else:
                self._call("Allgatherv", send, [recv, counts])
            return
        # No displacement may pass the limit either, so every rank's part goes out by itself.
        bounds = np.concatenate(([0], np.cumsum(counts)))
        for rank in range(self._comm.size):
            self._bcast(send, recv[bounds[rank] : bounds[rank + 1]], None, rank)

    def _alltoallv(self, send: NDArray[Any], recv: NDArray[Any], counts: Any, root: int) -> None:
        rank, size = self._comm.rank, self._comm.size
        mine = counts[rank]
        largest = max(sum(counts), max(counts) * size) * send.itemsize  # the same on every rank, as the branch must be
        if largest <= self._limit:
            self._call("Alltoallv", [send, counts], [recv, [mine] * size])
            return
        bounds = np.concatenate(([0], np.cumsum(counts)))
        for shift in range(size):
            to, source = (rank + shift) % size, (rank - shift) % size
            outgoing = send[bounds[to] : bounds[to + 1]]
            incoming = recv[source * mine : (source + 1) * mine]
            requests = [self._comm.Irecv(incoming[part], source) for part in self._cuts(incoming)]
            requests += [self._comm.Isend(outgoing[part], to) for part in self._cuts(outgoing)]
            self._wait(functools.partial(MPI.Request.Testall, requests))

    def _call(self, operation: str, *arguments: Any) -> None:
        """Run a collective; the same on every rank, whether it naps or not."""
        if self._naps:
            request = getattr(self._comm, f"I{operation.lower()}")(*arguments)
            self._wait(request.Test)
        else:
            getattr(self._comm, operation)(*arguments)

    def _wait(self, done: Callable[[], bool]) -> None:
        nap, longest = _NAP_S
        asked = 0
        while not done():
            asked += 1
            if asked <= _EAGER:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(2 * nap, longest)

    def _shares_cores(self) -> bool:
        """Tell whether some host has more ranks than cores, the same on all ranks; ``MPICOMP_NAPS=0/1`` overrides."""
        shared = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        said = os.environ.get("MPICOMP_NAPS")
        mine = shared.size > len(os.sched_getaffinity(0)) if said not in ("0", "1") else said == "1"
        shared.Free()
        everyones = np.empty(1, np.int32)
        self._comm.Allreduce(np.array([mine], np.int32), everyones, MPI.MAX)
        return bool(everyones[0])

    def _limit_of(self, array: NDArray[Any]) -> int:
        return max(1, self._limit // array.itemsize)

    def _cuts(self, array: NDArray[Any]) -> list[slice]:
        """Cut an array in parts whose bytes stay below the limit."""
        limit = self._limit_of(array)
        return [slice(start, start + limit) for start in range(0, array.size, limit)]

    def _sums_are_identical(self) -> bool:
        """Sum numbers for which the order matters and compare the bits. Two ranks cannot differ: a + b is b + a."""
        if self._comm.size <= 2:
            return True
        numbers = np.random.default_rng(self._comm.rank).standard_normal(_PROBE).astype(np.float32)
        total = np.empty_like(numbers)
        digests = []
        for size in (7, _PROBE):  # libraries take different paths for short and long messages
            self._call("Allreduce", numbers[:size], total[:size])
            digests.append(hashlib.blake2b(total[:size].tobytes(), digest_size=8).digest())
        mine = np.frombuffer(b"".join(digests), np.uint8)
        everyones = np.empty((self._comm.size, mine.size), np.uint8)
        self._comm.Allgather(mine, everyones)
        return bool((everyones == everyones[0]).all())


def _check_launch() -> None:
    vendor = "openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich"
    problem = launcher.singletons(None, MPI.COMM_WORLD.size, vendor)
    if problem is not None:
        raise LaunchError(f"mpi: {problem.what}; start it with: {problem.fix}")
