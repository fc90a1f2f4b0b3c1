"""Rounds over MPI, one after the other.

Only buffer operations are used, on communicators that are duplicated once, so that no other traffic can meet ours.
Importing this module imports mpi4py.MPI, which starts MPI, and sets the hooks that end the job when this rank fails.
"""

import contextlib
import functools
import hashlib
import os
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpicomp.errors import ClosedError, LaunchError, RankFailedError
from mpicomp.job import abort, cuda_aware, launcher, variables
from mpicomp.mpi import end
from mpicomp.mpi.channel import Channel, StartedRound
from mpicomp.mpi.channel_sets import ChannelSet
from mpicomp.mpi.failures import check_survives, failure_of, fault_tolerant
from mpicomp.mpi.pool import Pool, hosts_of_ranks, is_split, pool_of, rows_of_ranks
from mpicomp.mpi.rounds import ACROSS, HOST, WORLD, Group, Pending, Round
from mpicomp.mpi.transport import Transport, received, wait

COUNT_LIMIT = 2**31 - 1  # largest count, displacement and number of bytes that is handed to MPI in one call

_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}

abort.install()
end.install()


class MPITransport(Transport):
    """One rank of an MPI communicator (all ranks by default), which is duplicated. Collective; closing it is not.

    An MPI call that waits keeps its core busy. If ranks have a core each that is the fastest way to wait; if
    they share cores it takes them from the ranks that still compute, so there rounds are started without blocking and
    tested with sleeps in between.

    Messages are cut so that no count exceeds ``count_limit``. ``layout`` replaces the measured host of each rank, for
    tests. If a launcher started several processes that are all rank 0 of 1, ``comm=None`` is a `LaunchError`.
    """

    family = "mpi"

    def __init__(
        self, comm: MPI.Comm | None = None, count_limit: int = COUNT_LIMIT, layout: Sequence[int] | None = None
    ) -> None:
        if comm is None:
            vendor = "openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich"
            problem = launcher.singletons(MPI.COMM_WORLD.size, vendor)
            if problem is not None:
                reason, line = astuple(problem)
                raise LaunchError(
                    f"mpi: {reason}; start it with: {line} (a process that is to work alone passes comm=MPI.COMM_SELF)"
                )
        self._limit = count_limit
        self._connect(MPI.COMM_WORLD if comm is None else comm, layout)

    def _connect(self, found: MPI.Comm, layout: Sequence[int] | None) -> None:
        pool = pool_of(found, layout, self._limit)
        front, back = pool.acquire(found, 2)
        if found.rank == 0:
            variables.report_unknown()
        cores = cores_of_a_rank(found, hosts_of_ranks(found) if layout is not None else pool.hosts)
        sleeps = sleeps_while_waiting(found, cores) or pool.thread_level < MPI.THREAD_MULTIPLE or fault_tolerant()
        self._open(pool, front, back, sleeps)
        self.cores = cores
        self.group = self._with_sums(replace(pool.group, own_cores=not sleeps))

    def _open(self, pool: Pool, front: ChannelSet, back: ChannelSet, sleeps: bool) -> None:
        # The channels return to the pool when this is closed or collected.
        self._pool = pool
        self._front = front.channels
        self._back = back.channels
        self._sleeps = sleeps
        self._watchdog = pool.watchdog
        self._waits = pool.watchdog.waits
        self.activity = pool.watchdog.activity
        # Without a thread that polls the watchdog, each wait has to do it.
        threaded = pool.thread_level == MPI.THREAD_MULTIPLE and not fault_tolerant()
        self._on_wait = None if threaded else pool.watchdog.poll_if_due
        self._refusal: str | None = None
        self._sets = list(dict.fromkeys((front, back)))
        self._finalizer = weakref.finalize(self, pool.release, self._sets, dropped=True)
        self._finalizer.atexit = False

    @functools.cached_property
    def takes_device_memory(self) -> bool:  # type: ignore[override]
        version = MPI.Get_library_version()
        return cuda_aware.cuda_aware(MPI.get_vendor()[0], cuda_aware.library(), version=version).value

    def start(self, task: Round) -> Pending:
        channel = self._channel(task)
        if task.lends_device_memory:  # the call may block
            self._waits[self] = time.monotonic(), channel, channel.begun + 1, task.operation, self.user
        try:
            started = channel.start(task)
        finally:
            self._waits.pop(self, None)
        if not task.background:
            self._waits[started] = time.monotonic(), channel, started.number, task.operation, self.user
        return started

    def wait(self, pending: Pending) -> NDArray[Any]:
        assert isinstance(pending, StartedRound)
        task, channel = pending.task, self._channel(pending.task)
        if task.background:
            self._waits[pending] = time.monotonic(), channel, pending.number, task.operation, self.user
        try:
            pending.finish(self._sleeps, self._on_wait)
        finally:
            self._waits.pop(pending, None)
        channel.forget(pending)
        return received(task)

    def perform(self, task: Round) -> NDArray[Any]:
        if self._sleeps or task.operation == "sendrecv":
            return self.wait(self.start(task))
        if self._refusal is not None or self._pool.over or self._pool.abandoned:
            self._refuse()
        channel = (self._back if task.background else self._front)[task.group]
        memory = channel.memory_for(task)
        calls = _calls(channel, task) if memory is None else ()
        if calls is None:
            return self.wait(self.start(task))
        channel.begun += 1
        self._waits[self] = time.monotonic(), channel, channel.begun, task.operation, self.user
        try:
            if memory is not None:
                for _ in memory.sum(task, channel.comm.Barrier):
                    pass
            for name, arguments in calls:
                getattr(channel.comm, name)(*arguments)
            if task.factor != 1 and memory is None:
                for _ in channel.rest_of_sum(task, channel.comm.Allreduce):
                    pass
        except MPI.Exception as error:
            raise failure_of(error) from None
        finally:
            self._waits.pop(self, None)
        return received(task) if task.recv is None else task.recv

    def channel(self) -> Transport:
        [channel_set] = self._pool.acquire(self._front[WORLD].comm, 1)
        made = MPITransport.__new__(MPITransport)
        made._open(self._pool, channel_set, channel_set, self._sleeps)
        made.group, made.cores = self.group, self.cores
        return made

    def enter(self) -> int:
        number = self._front[WORLD].begun  # all ranks are here after the same round
        for channel_set in self._sets:
            channel_set.users.add(number)
            channel_set.last_user = number
        return number

    def retire(self, user: int) -> None:
        self._pool.retire(self._sets, user)

    def check_threads(self, alone: bool) -> None:
        provided = self._pool.thread_level
        if provided < (MPI.THREAD_SERIALIZED if alone else MPI.THREAD_MULTIPLE):
            level = "SERIALIZED" if alone else "MULTIPLE"
            raise LaunchError(
                f"mpi: a thread that exchanges during backward needs MPI_THREAD_{level}, and this MPI provides "
                f"MPI_THREAD_{_LEVELS[provided]}; set MPI4PY_RC_THREAD_LEVEL=multiple, or pass overlap=False, which "
                "needs no thread"
            )

    def abort_exchange(self, error: BaseException) -> None:
        if self._refusal is None and self.group.size > 1:
            self._refusal = (
                f"mpi: {type(error).__name__} broke off an exchange on this rank while others wait in it, so that "
                "nothing more can be exchanged; let the error end the program"
            )
            channels = [channel for channel_set in self._sets for channel in channel_set.channels.values()]
            self._watchdog.abort_exchange(channels, "".join(traceback.format_exception(error)))

    def check_survives(self, subsystem: str) -> None:
        check_survives(subsystem)
        abort.crash_at_once()

    def revoke(self) -> None:
        self._pool.revoke()

    def agree(self, flag: bool) -> bool:
        try:
            with self._inside_mpi():
                return bool(self._front[WORLD].comm.Agree(int(flag)))
        except MPI.Exception as error:
            if not isinstance(failure_of(error), RankFailedError):
                raise
            return False  # on all ranks

    def shrink(self) -> list[int]:
        before, offset, generation = self._front[WORLD].comm, self.offset, self.generation
        with self._inside_mpi():
            comm = before.Shrink()
        gone = MPI.Group.Difference(before.group, comm.group)
        lost = sorted(MPI.Group.Translate_ranks(gone, None, MPI.COMM_WORLD.group))
        self._finalizer.detach()
        self._pool.abandon()
        abort.ranks_died = True
        try:
            self._connect(comm, None)
        except MPI.Exception as error:
            if not isinstance(failure_of(error), RankFailedError):
                raise
            # The others may be in a call on a communicator that this rank does not have, so that it cannot revoke it.
            raise LaunchError(
                "mpi: another rank has died while those that are left became a group without the first one; the job "
                "ends: start it again from its last checkpoint"
            ) from error
        self.offset, self.generation = offset, generation + 1
        return lost

    @contextlib.contextmanager
    def _inside_mpi(self) -> Iterator[None]:
        self._watchdog.inside_mpi = True
        try:
            yield
        finally:
            self._watchdog.inside_mpi = False

    def close(self) -> None:
        if self._finalizer.detach() is not None:
            self._refusal = self._refusal or "mpi: the transport was closed; make a new one"
            self._pool.release(self._sets)

    def _channel(self, task: Round) -> Channel:
        if self._refusal is not None or self._pool.over or self._pool.abandoned:
            self._refuse()
        return (self._back if task.background else self._front)[task.group]

    def _refuse(self) -> NoReturn:
        if self._refusal is not None or self._pool.over:
            raise ClosedError(self._refusal or "mpi: MPI is finalized on this rank; nothing can be exchanged")
        raise RankFailedError("mpi: a rank has died")

    def _with_sums(self, group: Group) -> Group:
        names = (WORLD, HOST, ACROSS) if is_split(group) else (WORLD,)
        mine = [n not in self._front or sums_are_identical(self._front[n].comm, self._sleeps) for n in names]
        everyones = rows_of_ranks(self._front[WORLD].comm, np.array(mine))
        identical = {name: bool(flags.all()) for name, flags in zip(names, everyones.T, strict=True)}
        parts = (
            replace(
                p, identical_sums=identical.get(p.name, identical[WORLD]), shares_memory=self._shares_memory(p.name)
            )
            for p in group.parts
        )
        return replace(
            group, identical_sums=identical[WORLD], shares_memory=self._shares_memory(WORLD), parts=tuple(parts)
        )

    def _shares_memory(self, name: str) -> bool:
        return name in self._front and self._front[name].memory is not None


def _calls(channel: Channel, task: Round) -> Sequence[tuple[str, tuple[Any, ...]]] | None:
    made = task.calls_made
    if made is not None and made[0] is channel and made[1] is task.send and made[2] is task.recv:
        known: Sequence[tuple[str, tuple[Any, ...]]] = made[3]
        return known
    calls = channel.calls(task)
    if calls is not None and task.operation != "bcast":  # whose root copies its array each time
        task.calls_made = channel, task.send, task.recv, calls
    return calls


_PROBE = 1 << 14  # elements of the sum whose bits are compared
_CORES = 1 << 12  # cores of one machine; those with higher numbers do not count


def cores_of_a_rank(comm: MPI.Comm, hosts: Sequence[int]) -> float:
    """Return the allowed cores for each rank on the host where they are fewest, the same on all ranks. Collective.

    Ranks that are bound to no cores share them with ranks of the job that are not in ``comm``.
    """
    cores = os.sched_getaffinity(0)
    mine = np.zeros(_CORES, np.bool_)
    mine[[core for core in cores if core < _CORES]] = True
    sharing = launcher.ranks_of_host() if cores == os.sched_getaffinity(os.getppid()) else 1
    row = np.concatenate([np.packbits(mine), np.array([sharing], np.int32).view(np.uint8)])
    everyones = rows_of_ranks(comm, row)
    masks, shares = everyones[:, : _CORES // 8], everyones[:, _CORES // 8 :].copy().view(np.int32)
    on_host = [np.array(hosts) == host for host in set(hosts)]
    return float(
        min(
            np.unpackbits(np.bitwise_or.reduce(masks[ranks])).sum() / max(ranks.sum(), shares[ranks].max())
            for ranks in on_host
        )
    )


def sleeps_while_waiting(comm: MPI.Comm, cores: float) -> bool:
    """Return whether ranks that wait share their cores, or the value of ``MPICOMP_NAPS``. Collective."""
    wanted = variables.flag_or_none("MPICOMP_NAPS")
    return bool(rows_of_ranks(comm, np.array([cores < 1 if wanted is None else wanted])).any())


def sums_are_identical(comm: MPI.Comm, sleeps: bool) -> bool:
    """Sum numbers for which the order matters, with calls in use here, and compare the bits. Collective."""
    if comm.size <= 2:
        return True  # a + b is b + a
    numbers = np.random.default_rng(comm.rank).standard_normal(_PROBE).astype(np.float32)
    digests = []
    for size in (7, _PROBE):  # libraries take different paths for short and long messages
        sums = np.zeros((4, size), np.float32)
        for place, send in ((0, numbers[:size]), (1, MPI.IN_PLACE)):
            sums[place] = numbers[:size]
            wait(comm.Iallreduce(send, sums[place]).Test)
            if not sleeps:
                sums[place + 2] = numbers[:size]
                comm.Allreduce(send, sums[place + 2])
        digests.append(hashlib.blake2b(sums.tobytes(), digest_size=8).digest())
    everyones = rows_of_ranks(comm, np.frombuffer(b"".join(digests), np.uint8))
    return bool((everyones == everyones[0]).all())
