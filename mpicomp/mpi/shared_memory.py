"""Sums of long arrays by the ranks of one host, each a part of them, in memory that they share."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels import cpu
from mpicomp.mpi.rounds import FLAGS, MIN_SHARED, Round

Barrier = TypeVar("Barrier")

MAX_RANKS = 8
_FOLDER = "/dev/shm"  # as MPI libraries do
_TURNS = 2  # buffers that take turns: ranks still read the sum in one while others fill the next
_SLOT = 1 << 19  # bytes of a rank's slot in a buffer: all ranks' stay in the caches
_TAIL = 64  # bytes after a slot: whether a rank's part of the sum is finite, and the flags of a round, in float64
_MIN_FREE = 8  # sizes of the memory that are free in the folder: MPI and data loaders need it, too
_TYPES = (np.dtype(np.float32), np.dtype(np.float64))


class SharedMemory:
    """A slot of each rank for its part of the input, in buffers that take turns.

    All ranks write a segment of their arrays to their slots. After a barrier each sums its own part of the segment, in
    the order of ranks, to the first slot, and after another one all read the sum. A sum has the same bits on all ranks.
    """

    def __init__(self, memory: Any, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._rows = np.frombuffer(memory, np.uint8).reshape(_TURNS, ranks, _SLOT + _TAIL)
        self._slots: dict[np.dtype[Any], NDArray[np.floating]] = {}
        self._flags = self._rows[:, :, _SLOT:].view(np.float64)[:, :, : 1 + FLAGS]
        self._turn = 0

    def takes(self, task: Round) -> bool:
        """Return whether a sum is faster here than by MPI."""
        # Rounds in the background would take turns in another order on every rank.
        is_long = task.counts[0] >= MIN_SHARED and not task.background
        return is_long and task.dtype in _TYPES and not task.lends_device_memory

    def sum(self, task: Round, barrier: Callable[[], Barrier]) -> Iterator[Barrier]:
        """Sum a round's arrays; yield each barrier, to be waited for. Collective.

        Barriers are MPI's: a rank that polled this memory alone would not advance rounds that others wait for.
        """
        send: Any = task.send
        recv: Any = task.recv
        numel, rank, ranks = task.counts[0], self._rank, self._ranks
        slots = self._slots_of(task.dtype)
        step, nonfinite = slots.shape[2], 0.0
        for start in range(0, numel, step):
            length = min(step, numel - start)
            part = slice(start, start + length)
            turn, self._turn = self._turn, (self._turn + 1) % _TURNS
            total = slots[turn, 0]
            np.copyto(slots[turn, rank, :length], send[part])
            yield barrier()
            part_of_rank = slice(length * rank // ranks, length * (rank + 1) // ranks)
            mine = total[part_of_rank]
            with np.errstate(over="ignore", invalid="ignore"):
                for other in range(1, ranks):
                    np.add(mine, slots[turn, other, part_of_rank], out=mine)
            flags = self._flags[turn]
            if task.factor != 1:
                flags[rank, 0] = not cpu.scale(mine, task.factor)
            if task.flags is not None:
                flags[rank, 1:] = task.flags
            yield barrier()
            np.copyto(recv[part], total[:length])
            nonfinite += flags[:, 0].sum()
        if task.factor != 1:
            task.finite = nonfinite == 0
        if task.flags is not None:
            task.flags[:] = flags[:, 1:].sum(axis=0)

    def _slots_of(self, dtype: np.dtype[Any]) -> NDArray[np.floating]:
        if dtype not in self._slots:
            self._slots[dtype] = self._rows[:, :, :_SLOT].view(dtype)
        return self._slots[dtype]


class _Comm(Protocol):
    rank: int
    size: int


def share(comm: _Comm, gather: Callable[[NDArray[Any]], NDArray[Any]]) -> SharedMemory | None:
    """Return memory that the ranks of a host share; None, on all ranks, where they cannot. Collective.

    ``gather`` returns the rows of all ranks. The file has no name any more when this returns, so that the memory is
    freed with the last rank.
    """
    if not 1 < comm.size <= MAX_RANKS:
        return None
    size = _TURNS * comm.size * (_SLOT + _TAIL)
    path, memory = "", None
    if comm.rank == 0:
        path = _make_file(size)
    name = np.zeros(256, np.uint8)
    name[: len(path)] = np.frombuffer(path.encode(), np.uint8)
    name = gather(name)[0]
    path = name.tobytes().rstrip(b"\0").decode()
    if path:
        memory = _map(path, size)
    everyones = gather(np.array([memory is not None]))
    if comm.rank == 0 and path:
        os.unlink(path)
    return SharedMemory(memory, comm.rank, comm.size) if everyones.all() else None


def _make_file(size: int) -> str:
    try:
        folder = os.statvfs(_FOLDER)
        if folder.f_bavail * folder.f_frsize < _MIN_FREE * size:
            return ""
        file, path = tempfile.mkstemp(prefix="mpicomp-", dir=_FOLDER)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, size)  # a full folder would end the process when it writes
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(file)
    return path


def _map(path: str, size: int) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(file, size)
    except OSError:
        return None
    finally:
        os.close(file)
