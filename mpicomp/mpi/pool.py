"""Communicators of the same ranks, handed out, taken back without waiting for a rank, and handed out again.

MPI frees a communicator when all of its ranks ask for it together. Nothing may wait for that while an exception is on
its way out, and a transport that is not closed is collected at another time on every rank. So nothing is freed: a rank
offers the sets that it got back when the ranks next make a transport, which they do together, and those that all offer
in the same state are handed out again.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError
from mpicomp.job import print_stderr, variables
from mpicomp.mpi.channel import Channel
from mpicomp.mpi.channel_sets import NAMES, ChannelSet, Closing, Closings
from mpicomp.mpi.failures import Process, UnreportedDeaths, fault_tolerant, kept, running_process
from mpicomp.mpi.rounds import ACROSS, HOST, WORLD, Group, layout_groups
from mpicomp.mpi.shared_memory import SharedMemory, share
from mpicomp.mpi.transport import wait
from mpicomp.mpi.watchdog import STALL_END_S, STALL_S, Watchdog
from mpicomp.mpi.watcher import Watched, watcher

_OFFERS, _ALONE = -1, -2  # keys of channels outside of sets
_RANK_NUMBERS = 5  # numbers of a rank before its offers
_MAX_OFFERS = 32  # sets of channels that a rank offers at a time
_SETS_BEFORE_GC = 48  # sets in use, after which garbage is collected first: MPICH has communicators for some 350
_SET_NUMBERS = 1 + len(NAMES)  # numbers in an offer: which, and the rounds begun on its channels


class Pool:
    """The communicators that this process keeps for one list of ranks, handed out as sets of channels."""

    def __init__(self, comm: MPI.Comm, names: Sequence[int], layout: Sequence[int] | None, limit: int) -> None:
        self.hosts = list(hosts_of_ranks(comm) if layout is None else layout)
        self.group, self.members = layout_groups(self.hosts, comm.rank)
        self.thread_level = MPI.Query_thread()
        self.over = False  # this rank has left, so that nothing can be begun any more
        self.abandoned = False  # one of these ranks has died, so that nothing works any more
        self._everyones_members = [layout_groups(self.hosts, rank)[1] for rank in range(comm.size)]
        self._limit = limit
        self._sets: dict[int, ChannelSet] = {}
        self._closings = Closings(self._sets)
        self._next = 0
        self._offers = Channel(MPI.COMM_NULL, limit, _OFFERS, range(comm.size))
        self._lock = threading.Lock()
        self._dropped = self._has_warned = False
        self.watchdog = Watchdog(comm.Dup(), names, self._closings)
        self.watchdog.add([self._offers])
        self._watched: Watched | None = None
        # Open MPI's agreement breaks if another thread moves messages at the same time.
        if comm.size > 1 and fault_tolerant():
            rows = rows_of_ranks(comm, np.array(running_process(os.getpid()), np.int64))
            host, watchdog = self.hosts[comm.rank], self.watchdog
            here = [rank for rank in range(comm.size) if self.hosts[rank] == host and rank != comm.rank]
            peers = {names[rank]: Process(*rows[rank].tolist()) for rank in here}
            self._watched = UnreportedDeaths(
                names[comm.rank], peers, lambda: bool(watchdog.waits) or watchdog.inside_mpi
            )
        elif comm.size > 1 and self.thread_level == MPI.THREAD_MULTIPLE:
            self._watched = self.watchdog
        if self._watched is not None:
            watcher.add(self._watched)

    def acquire(self, comm: MPI.Comm, count: int) -> list[ChannelSet]:
        """Return unused sets of channels, the same on all ranks. Collective over ``comm``."""
        offered = self._offer()
        rows = self._gather_offers(comm, offered)
        stall_s, end_s = (rows[0, [0, 3]] / 1e6).tolist()
        wrong = int(rows[:, 4].max())
        taken: list[ChannelSet] = []
        if min(stall_s, end_s) >= 0 > wrong:
            offers = rows[:, _RANK_NUMBERS:].reshape(comm.size, _MAX_OFFERS, _SET_NUMBERS)
            taken = [self._sets[number] for number in self._common(offers)[:count]]
        for channel_set in offered:
            channel_set.free = channel_set not in taken
        # Limits are those of rank 0.
        if wrong >= 0:
            name = variables.FLAGS[wrong]
            raise ConfigurationError(f"mpi: {name} must be {variables.FLAG_WORDS}, and on some rank it is not")
        for name, seconds in (("MPICOMP_STALL", stall_s), ("MPICOMP_STALL_END", end_s)):
            if seconds < 0:
                raise ConfigurationError(
                    f"mpi: {name} must be a number of seconds, or 0 for never, and on rank 0 it is not"
                )
        self.watchdog.stall_s, self.watchdog.end_s = stall_s, end_s
        self.thread_level = int(rows[:, 1].min())
        self._next = int(rows[:, 2].max())
        while len(taken) < count:
            taken.append(self._make(comm.Dup()))
        for channel_set in taken:
            channel_set.generation += 1
        if self._dropped and not self._has_warned and comm.rank == 0:
            self._has_warned = True
            print_stderr(
                "reducers or transports were dropped without close(); their communicators are used again as "
                "soon as every rank has collected them. Call close() where one is needed no longer"
            )
        return taken

    def release(self, sets: Iterable[ChannelSet], dropped: bool = False) -> None:
        """Take back sets of channels; not collective. ``dropped``: the program forgot to close their owner."""
        self._dropped |= dropped
        sets = list(sets)
        for back in sets:
            self.watchdog.forget(back.channels.values())
            back.users.clear()
        self._announce(sets, 0, dropped)
        for back in sets:
            back.free = True

    def retire(self, sets: Iterable[ChannelSet], user: int) -> None:
        """Note that a user runs no more rounds on these sets on this rank; not collective."""
        used = [channel_set for channel_set in sets if user in channel_set.users]
        for channel_set in used:
            channel_set.users.discard(user)
        self._announce(used, user)

    def _announce(self, sets: Sequence[ChannelSet], user: int, dropped: bool = False) -> None:
        if self.over or self.abandoned:
            return
        for channel_set in sets:
            self._closings.forget(channel_set.number, user)
        closings = [Closing(used.number, used.generation, user, *used.begun) for used in sets]
        self.watchdog.announce(closings, dropped)

    def revoke(self) -> None:
        """Have everything that ranks are in, or begin, on these communicators end with an error; not collective."""
        for channel_set in self._sets.values():
            for channel in channel_set.channels.values():
                channel.comm.Revoke()

    def abandon(self) -> None:
        """Give these ranks up, one of which has died: no rank waits for them at the end."""
        self.abandoned = True
        kept.append(self)
        for key, pool in list(pools.items()):
            if pool is self:
                del pools[key]
        watcher.drop(self._watched)

    def progress(self) -> bool:
        """Advance the rounds under way; return whether none is left."""
        return False not in [channel_set.progress() for channel_set in list(self._sets.values())]

    def _offer(self) -> list[ChannelSet]:
        if sum(not channel_set.free for channel_set in self._sets.values()) > _SETS_BEFORE_GC:
            gc.collect()  # their owners may be garbage that was not collected yet
        with self._lock:
            free = [channel_set for channel_set in self._sets.values() if channel_set.free and channel_set.progress()]
            offered = free[:_MAX_OFFERS]
            for channel_set in offered:
                channel_set.free = False
        return offered

    def _gather_offers(self, comm: MPI.Comm, offered: Sequence[ChannelSet]) -> NDArray[np.int64]:
        mine = np.full(_RANK_NUMBERS + _MAX_OFFERS * _SET_NUMBERS, -1, np.int64)
        limits_s = variables.seconds("MPICOMP_STALL", STALL_S), variables.seconds("MPICOMP_STALL_END", STALL_END_S)
        stall, end = (round(seconds * 1e6) for seconds in limits_s)
        mine[:_RANK_NUMBERS] = stall, MPI.Query_thread(), self._next, end, variables.wrong_flag()  # microseconds
        for position, channel_set in enumerate(offered):
            start = _RANK_NUMBERS + position * _SET_NUMBERS
            mine[start : start + _SET_NUMBERS] = channel_set.number, *channel_set.begun
        self._offers.begun += 1
        self.watchdog.waits[self] = time.monotonic(), self._offers, self._offers.begun, "making of a transport", 0
        try:
            return rows_of_ranks(comm, mine, self.watchdog.poll_if_due)
        finally:
            self.watchdog.waits.pop(self, None)

    def _common(self, offers: NDArray[np.int64]) -> list[int]:
        # Those that all ranks offer, with equal numbers of rounds begun among the ranks of a channel.
        of_rank = [{int(row[0]): row[1:].tolist() for row in offer if row[0] >= 0} for offer in offers]
        return [
            number
            for number in sorted(set.intersection(*map(set, of_rank)))
            if all(
                of_rank[rank][number][NAMES.index(name)] == of_rank[ranks[0]][number][NAMES.index(name)]
                for rank, members in enumerate(self._everyones_members)
                for name, ranks in members.items()
            )
        ]

    def _make(self, world: MPI.Comm) -> ChannelSet:
        number = self._next
        self._next += 1
        memory = _shared_memory(world) if self.group.hosts == 1 else None
        whole = Channel(world, self._limit, number * len(NAMES), self.members[WORLD], memory)
        channels = {WORLD: whole}
        if is_split(self.group):
            for place, name in enumerate(NAMES[1:], 1):
                members = self.members.get(name)
                comm = world.Split(MPI.UNDEFINED if members is None else members[0], world.rank)
                if members is not None:
                    memory = _shared_memory(comm) if name == HOST else None
                    channels[name] = Channel(comm, self._limit, number * len(NAMES) + place, members, memory)
        else:
            alone = Channel(MPI.COMM_SELF, self._limit, _ALONE, [self.group.rank])
            one = self.group.hosts == 1
            channels |= {HOST: whole if one else alone, ACROSS: alone if one else whole}
        self.watchdog.add(channels.values())
        made = self._sets[number] = ChannelSet(number, channels)
        return made


def rows_of_ranks(comm: MPI.Comm, row: NDArray[Any], on_wait: Callable[[], None] | None = None) -> NDArray[Any]:
    """Return the rows of all ranks, of one length and dtype. Collective."""
    rows = np.empty((comm.size, row.size), row.dtype)
    wait(comm.Iallgather(row, rows).Test, on_wait)
    return rows


def _shared_memory(comm: MPI.Comm) -> SharedMemory | None:
    # Open MPI's barriers do not survive a rank's death.
    return None if fault_tolerant() else share(comm, lambda row: rows_of_ranks(comm, row))


def is_split(group: Group) -> bool:
    """Return whether some group of a host, or across hosts, is neither all ranks nor one alone."""
    return 1 < group.hosts < group.size


_Ranks = tuple[tuple[int, ...], tuple[int, ...] | None, int]

pools: dict[_Ranks | Pool, Pool] = {}
"""All pools of this process; one with ranks outside of MPI.COMM_WORLD is its own key."""


def pool_of(comm: MPI.Comm, layout: Sequence[int] | None, limit: int) -> Pool:
    """Return the pool of a communicator's ranks; see `Pool` for the others. Collective over ``comm``."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    names = tuple(group.Translate_ranks(None, world))
    group.Free()
    world.Free()
    key = (names, None if layout is None else tuple(layout), limit)
    known = MPI.UNDEFINED not in names
    if known and key in pools:
        return pools[key]
    _barrier(comm)
    made = Pool(comm, names if known else range(comm.size), layout, limit)
    pools[key if known else made] = made
    return made


def _barrier(comm: MPI.Comm) -> None:
    began, has_warned = time.monotonic(), False
    seconds = variables.seconds("MPICOMP_STALL", STALL_S) or float("inf")

    def warn_after_a_while() -> None:
        nonlocal has_warned
        if not has_warned and time.monotonic() - began > (seconds if seconds > 0 else STALL_S):
            has_warned = True
            print_stderr(
                f"rank {MPI.COMM_WORLD.rank} has waited for {time.monotonic() - began:.0f} s for the other "
                "ranks to make a reducer or a transport, too; all ranks of its communicator have to. MPICOMP_STALL=0 "
                "turns this off"
            )

    wait(comm.Ibarrier().Test, warn_after_a_while)


def hosts_of_ranks(comm: MPI.Comm) -> list[int]:
    """Return the host of each rank, numbered in the order in which they first appear. Collective."""
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([comm.rank], np.int64)
    wait(shared.Ibcast(first, 0).Test)
    shared.Free()
    firsts = rows_of_ranks(comm, first).ravel().tolist()
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(firsts))}
    return [numbers[rank] for rank in firsts]
