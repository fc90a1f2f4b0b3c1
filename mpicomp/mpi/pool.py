"""Communicators of the same ranks, handed out, taken back without waiting for anybody, and handed out again.

MPI frees a communicator when all of its ranks ask for it together. Nothing may wait for that while an exception is on
its way out, and what is dropped without a word is collected at another time on every rank. So nothing is freed: what
this rank gets back it offers when the ranks next make a transport, which they do together, and what all of them offer
in the same state is handed out again.
"""

import gc
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError
from mpicomp.job import say, variables
from mpicomp.mpi.channel import Channel
from mpicomp.mpi.failures import Process, UnreportedDeaths, fault_tolerant, kept, running_process
from mpicomp.mpi.rounds import ACROSS, HOST, WORLD, Group, layout_groups
from mpicomp.mpi.transport import wait
from mpicomp.mpi.watchdog import STALL_END_S, STALL_S, Closing, StallWatchdog, lookout

_NAMES = (WORLD, HOST, ACROSS)
_MEETING, _ALONE = -1, -2  # keys of channels that are none of a set's
_RANK_NUMBERS = 5  # numbers of a rank before its offers
_MAX_OFFERS = 32  # sets of channels that a rank offers at a time
_SETS_BEFORE_GC = 48  # sets in use, after which garbage is collected first: MPICH has communicators for some 350
_SET_NUMBERS = 1 + len(_NAMES)  # numbers in an offer: which, and the rounds begun on its channels


@dataclass(eq=False)
class ChannelSet:
    """A channel for each group that this rank is in; groups of the same ranks share one."""

    number: int  # the same on all ranks
    channels: dict[str, Channel]  # by the group's name
    free: bool = False  # whether its owner has returned it
    users: set[int] = field(default_factory=set)  # what uses it now, by numbers that are the same on all ranks
    last_user: int = 0  # the highest of those numbers so far; 0 where there was none
    generation: int = 0  # times that it was handed out

    @property
    def begun(self) -> list[int]:
        """Rounds begun on each channel, which its ranks have to have in common before it is used again."""
        return [self.channels[name].begun if name in self.channels else 0 for name in _NAMES]

    def progress(self) -> bool:
        """Advance the rounds under way; return whether none is left."""
        return False not in [channel.progress() for channel in self.channels.values()]


class Pool:
    """The communicators that this process keeps for one list of ranks, handed out as sets of channels."""

    def __init__(self, comm: MPI.Comm, names: Sequence[int], layout: Sequence[int] | None, limit: int) -> None:
        self.hosts = list(hosts_of_ranks(comm) if layout is None else layout)
        self.group, self.members = layout_groups(self.hosts, comm.rank)
        self.thread_level = MPI.Query_thread()
        self.over = False  # this rank has left, so that nothing can be begun any more
        self.abandoned = False  # one of these ranks has died, so that nothing works any more
        self.watch = None if comm.size == 1 else StallWatchdog(comm.Dup(), names, self)
        self._everyones_members = [layout_groups(self.hosts, rank)[1] for rank in range(comm.size)]
        self._limit = limit
        self._sets: dict[int, ChannelSet] = {}
        self._closings: dict[tuple[int, int, int], Closing] = {}  # by the other rank, its set and that one's user
        self._next = 0
        self._meeting = Channel(MPI.COMM_NULL, limit, _MEETING, range(comm.size))
        self._lock = threading.Lock()
        self._dropped = self._said = False
        if self.watch is not None:
            self.watch.add([self._meeting])
            lookout.add(self.watch)
        self.deaths = self._watch_processes(comm, names) if fault_tolerant() and comm.size > 1 else None

    def acquire(self, comm: MPI.Comm, count: int) -> list[ChannelSet]:
        """Return sets of channels that nobody else uses, the same on all ranks. Collective over ``comm``."""
        offered = self._offer()
        everyones = self._meet(comm, offered)
        offers = everyones[:, _RANK_NUMBERS:].reshape(comm.size, _MAX_OFFERS, _SET_NUMBERS)
        stall_s, end_s = (everyones[0, [0, 3]] / 1e6).tolist()
        wrong = int(everyones[:, 4].max())
        taken = (
            [self._sets[number] for number in self._common(offers)[:count]] if min(stall_s, end_s) >= 0 > wrong else []
        )
        for channel_set in offered:
            channel_set.free = channel_set not in taken
        _check_variables(stall_s, end_s, wrong)
        if self.watch is not None:
            self.watch.seconds, self.watch.end_s = stall_s, end_s
        self.thread_level = int(everyones[:, 1].min())
        self._next = int(everyones[:, 2].max())
        while len(taken) < count:
            taken.append(self._make(comm.Dup()))
        for channel_set in taken:
            channel_set.generation += 1
        self._say_once(comm.rank)
        return taken

    def release(self, sets: Iterable[ChannelSet], dropped: bool = False) -> None:
        """Take back sets of channels; not collective. ``dropped``: the program forgot to close their owner."""
        self._dropped |= dropped
        sets = list(sets)
        for back in sets:
            if self.watch is not None:
                self.watch.forget(back.channels.values())
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
        """Tell the ranks that may still wait for this one that it begins no more rounds there, or none for a user."""
        if self.watch is None or self.over or self.abandoned:
            return
        for channel_set in sets:
            for rank, number, of_user in list(self._closings):
                if number == channel_set.number and of_user and user in (0, of_user):
                    self._closings.pop((rank, number, of_user), None)  # nothing waits for that user here any more
        closings = [Closing(used.number, used.generation, user, *used.begun) for used in sets]
        self.watch.close(closings, dropped)

    def record_closing(self, rank: int, closing: Closing) -> None:
        """Keep a rank's notice, which may come before this rank has made the set or begun its next use."""
        known = self._sets.get(closing.set_number)
        if known is not None and known.generation >= closing.generation:
            retired = 0 < closing.user <= known.last_user and closing.user not in known.users
            if retired or known.generation > closing.generation:
                return
        self._closings[rank, closing.set_number, closing.user] = closing

    def closed_by(self, key: int, number: int, user: int) -> set[int]:
        """Return the ranks that will not begin this round of a channel and a user."""
        set_number, place = divmod(key, len(_NAMES))
        known = self._sets.get(set_number)
        return {
            rank
            for (rank, of_set, of_user), closing in list(self._closings.items())
            if known is not None
            and of_set == set_number
            and of_user in (0, user)
            and closing.generation == known.generation
            and closing.begun[place] < number
        }

    def revoke(self) -> None:
        """Have everything that ranks are in, or begin, on these communicators end with an error; not collective."""
        for channel_set in self._sets.values():
            for channel in channel_set.channels.values():
                channel.comm.Revoke()

    def abandon(self) -> None:
        """Give these ranks up, one of which has died: nobody waits for them at the end."""
        self.abandoned = True
        if self.deaths is not None:
            self.deaths.stop()
        kept.append(self)
        for key, pool in list(pools.items()):
            if pool is self:
                del pools[key]
        if self.watch is not None:
            lookout.drop(self.watch)

    def progress(self) -> bool:
        """Move on everything that is under way and return whether nothing is."""
        return False not in [channel_set.progress() for channel_set in list(self._sets.values())]

    def _watch_processes(self, comm: MPI.Comm, names: Sequence[int]) -> UnreportedDeaths:
        """Watch the processes of the other ranks on this rank's host. Collective."""
        mine = np.array(running_process(os.getpid()), np.int64)
        everyones = np.empty((comm.size, mine.size), np.int64)
        wait(comm.Iallgather(mine, everyones).Test)
        here = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[comm.rank] and rank != comm.rank]
        peers = {names[rank]: Process(*everyones[rank].tolist()) for rank in here}
        watch = self.watch
        return UnreportedDeaths(names[comm.rank], peers, lambda: watch is not None and watch.waits)

    def _offer(self) -> list[ChannelSet]:
        """Return the channels that this rank knows to be free; nobody else offers them meanwhile."""
        if sum(not channel_set.free for channel_set in self._sets.values()) > _SETS_BEFORE_GC:
            gc.collect()  # what had them may be garbage that nobody has looked at yet
        with self._lock:
            free = [channel_set for channel_set in self._sets.values() if channel_set.free and channel_set.progress()]
            offered = free[:_MAX_OFFERS]
            for channel_set in offered:
                channel_set.free = False
        return offered

    def _meet(self, comm: MPI.Comm, offered: Sequence[ChannelSet]) -> NDArray[np.int64]:
        """Exchange the ranks' offers before channels are handed out, a row for each."""
        mine = np.full(_RANK_NUMBERS + _MAX_OFFERS * _SET_NUMBERS, -1, np.int64)
        limits_s = variables.seconds("MPICOMP_STALL", STALL_S), variables.seconds("MPICOMP_STALL_END", STALL_END_S)
        stall, end = (round(seconds * 1e6) for seconds in limits_s)
        mine[:_RANK_NUMBERS] = stall, MPI.Query_thread(), self._next, end, variables.wrong_flag()  # microseconds
        for position, channel_set in enumerate(offered):
            start = _RANK_NUMBERS + position * _SET_NUMBERS
            mine[start : start + _SET_NUMBERS] = channel_set.number, *channel_set.begun
        everyones = np.empty((comm.size, mine.size), np.int64)
        self._meeting.begun += 1
        watch = self.watch
        if watch is not None:
            watch.begin(self._meeting, self._meeting, self._meeting.begun, "making of a transport")
        try:
            wait(comm.Iallgather(mine, everyones).Test, None if watch is None else watch.tick)
        finally:
            if watch is not None:
                watch.end(self._meeting)
        return everyones

    def _common(self, offers: NDArray[np.int64]) -> list[int]:
        """Return the numbers that all ranks offer, with as many rounds begun on a channel as its other ranks have."""
        of_rank = [{int(row[0]): row[1:].tolist() for row in offer if row[0] >= 0} for offer in offers]
        return [
            number
            for number in sorted(set.intersection(*map(set, of_rank)))
            if all(
                of_rank[rank][number][_NAMES.index(name)] == of_rank[ranks[0]][number][_NAMES.index(name)]
                for rank, members in enumerate(self._everyones_members)
                for name, ranks in members.items()
            )
        ]

    def _make(self, world: MPI.Comm) -> ChannelSet:
        """Make another set on a communicator that nothing else uses. Collective."""
        number = self._next
        self._next += 1
        whole = Channel(world, self._limit, number * len(_NAMES), self.members[WORLD])
        channels = {WORLD: whole}
        if is_split(self.group):
            for place, name in enumerate(_NAMES[1:], 1):
                members = self.members.get(name)
                comm = world.Split(MPI.UNDEFINED if members is None else members[0], world.rank)
                if members is not None:
                    channels[name] = Channel(comm, self._limit, number * len(_NAMES) + place, members)
        else:
            alone = Channel(MPI.COMM_SELF, self._limit, _ALONE, [self.group.rank])
            one = self.group.hosts == 1
            channels |= {HOST: whole if one else alone, ACROSS: alone if one else whole}
        if self.watch is not None:
            self.watch.add(channels.values())
        made = self._sets[number] = ChannelSet(number, channels)
        return made

    def _say_once(self, rank: int) -> None:
        if self._dropped and not self._said and rank == 0:
            self._said = True
            say(
                "reducers or transports were dropped without close(); their communicators are used again as "
                "soon as every rank has collected them. Call close() where one is needed no longer"
            )


def is_split(group: Group) -> bool:
    """Return whether some group of a host, or across hosts, is neither all ranks nor one alone."""
    return 1 < group.hosts < group.size


_Ranks = tuple[tuple[int, ...], tuple[int, ...] | None, int]

pools: dict[_Ranks | Pool, Pool] = {}
"""All of this process; those of ranks that are not in MPI.COMM_WORLD go by themselves."""


def pool_of(comm: MPI.Comm, layout: Sequence[int] | None, limit: int) -> Pool:
    """Return the pool of a communicator's ranks; see `Pool` for the others. Collective over ``comm``."""
    names = _world_ranks(comm)
    key = (names, None if layout is None else tuple(layout), limit)
    known = MPI.UNDEFINED not in names
    if known and key in pools:
        return pools[key]
    _gather_all(comm)
    made = Pool(comm, names if known else range(comm.size), layout, limit)
    pools[key if known else made] = made
    return made


def _gather_all(comm: MPI.Comm) -> None:
    """Wait until all ranks have come for the first time, and say after a while that some have not."""
    began, said = time.monotonic(), False
    seconds = variables.seconds("MPICOMP_STALL", STALL_S) or float("inf")

    def meanwhile() -> None:
        nonlocal said
        if not said and time.monotonic() - began > (seconds if seconds > 0 else STALL_S):
            said = True
            say(
                f"rank {MPI.COMM_WORLD.rank} has waited for {time.monotonic() - began:.0f} s for the other "
                "ranks to make a reducer or a transport, too; all ranks of its communicator have to. MPICOMP_STALL=0 "
                "turns this off"
            )

    wait(comm.Ibarrier().Test, meanwhile)


def _world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    names = tuple(group.Translate_ranks(None, world))
    group.Free()
    world.Free()
    return names


def hosts_of_ranks(comm: MPI.Comm) -> list[int]:
    """Return the host of each rank, numbered in the order in which they first appear. Collective."""
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([comm.rank], np.int64)
    wait(shared.Ibcast(first, 0).Test)
    shared.Free()
    firsts = np.empty(comm.size, np.int64)
    wait(comm.Iallgather(first, firsts).Test)
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(firsts.tolist()))}
    return [numbers[rank] for rank in firsts.tolist()]


def _check_variables(stall_s: float, end_s: float, wrong: int) -> None:
    """Raise on all ranks if a limit of rank 0 is not a number of seconds, or some rank's flag is neither on nor off."""
    if wrong >= 0:
        name = variables.FLAGS[wrong]
        raise ConfigurationError(f"mpi: {name} must be {variables.FLAG_WORDS}, and on some rank it is not")
    for name, seconds in (("MPICOMP_STALL", stall_s), ("MPICOMP_STALL_END", end_s)):
        if seconds < 0:
            raise ConfigurationError(
                f"mpi: {name} must be a number of seconds, or 0 for never, and on rank 0 it is not"
            )
