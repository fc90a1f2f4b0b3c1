"""Rounds on communicators of their own, one for each group that this rank is in."""

import traceback
import weakref
from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from mpicomp.errors import ClosedError, LaunchError
from mpicomp.rounds import WORLD, Group, Pending, Round
from mpicomp.transport.base import Transport, received
from mpicomp.transport.mpi_pool import ChannelSet, Pool
from mpicomp.transport.mpi_rounds import Channel, Started

_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


class MPILane(Transport):
    """Runs rounds among ranks that know each other already; `MPITransport` is one.

    An MPI call that waits keeps its core busy. Where ranks have a core each that is the fastest way to wait; where
    they share cores it takes them from the ranks that still compute, so there rounds are started without blocking
    and asked for with naps in between.

    Parameters
    ----------
    group : Group
        All ranks.
    pool : Pool
        Theirs; it gets the channels back when the lane is closed, or collected.
    front, back : ChannelSet
        For rounds that are waited for at once and for those in the background, so that these need not begin in one
        order with the others.
    naps : bool
        Whether ranks share cores.
    """

    family = "mpi"

    def __init__(self, group: Group, pool: Pool, front: ChannelSet, back: ChannelSet, naps: bool) -> None:
        super().__init__()
        self.group = group
        self._pool = pool
        self._front = front.channels
        self._back = back.channels
        self._naps = naps
        self._watch = pool.watch
        # Where there is no thread that looks who is missing, whatever waits has to do it.
        threaded = pool.thread_level == MPI.THREAD_MULTIPLE
        self._meanwhile = None if threaded or pool.watch is None else pool.watch.tick
        self._refusal: str | None = None
        self._sets = list(dict.fromkeys((front, back)))
        self._finalizer = weakref.finalize(self, pool.put, self._sets, dropped=True)
        self._finalizer.atexit = False

    def start(self, task: Round) -> Pending:
        """See `Transport.start`."""
        channel = self._channel(task)
        started = channel.start(task)
        if self._watch is not None and not task.background:
            self._watch.begin(started, channel, started.number, task.operation)
        return started

    def wait(self, pending: Pending) -> NDArray[Any]:
        """See `Transport.wait`."""
        assert isinstance(pending, Started)
        channel = self._channel(pending.task)
        if self._watch is not None and pending.task.background:
            self._watch.begin(pending, channel, pending.number, pending.task.operation)
        try:
            pending.finish(self._naps, self._meanwhile)
        finally:
            if self._watch is not None:
                self._watch.end(pending)
        channel.done(pending)
        return received(pending.task)

    def perform(self, task: Round) -> NDArray[Any]:
        """See `Transport.perform`."""
        channel = self._channel(task)
        if self._watch is not None:
            self._watch.begin(self, channel, channel.begun + 1, task.operation)
        try:
            channel.perform(task, self._naps, self._meanwhile)
        finally:
            if self._watch is not None:
                self._watch.end(self)
        return received(task)

    def lanes(self, count: int) -> list[Transport]:
        """See `Transport.lanes`."""
        world = self._front[WORLD].comm
        # A lane never blocks, so that what it begins in one order may be under way together.
        return [MPILane(self.group, self._pool, own, own, self._naps) for own in self._pool.take(world, count)]

    def doing(self, what: str) -> None:
        """See `Transport.doing`."""
        if self._watch is not None:
            self._watch.about = what

    def check_threads(self, alone: bool) -> None:
        """See `Transport.check_threads`."""
        provided = self._pool.thread_level
        if provided < (MPI.THREAD_SERIALIZED if alone else MPI.THREAD_MULTIPLE):
            raise LaunchError(
                f"mpi: a thread for rounds needs MPI_THREAD_{'SERIALIZED' if alone else 'MULTIPLE'}, and this MPI "
                f"provides MPI_THREAD_{_LEVELS[provided]}; set MPI4PY_RC_THREAD_LEVEL=multiple, or run rounds without "
                "a thread"
            )

    def break_off(self, error: BaseException) -> None:
        """See `Transport.break_off`."""
        if self._refusal is None and self.group.size > 1:
            self._refusal = (
                f"mpi: {type(error).__name__} broke off an exchange on this rank while others go on with it, so that "
                "nothing more can be exchanged; let the error end the program"
            )
            if self._watch is not None:
                channels = [channel for own in self._sets for channel in own.channels.values()]
                self._watch.break_off(channels, "".join(traceback.format_exception(error)))

    def close(self) -> None:
        """See `Transport.close`."""
        if self._finalizer.detach() is not None:
            self._refusal = self._refusal or "mpi: the transport was closed; make a new one"
            self._pool.put(self._sets)

    def _channel(self, task: Round) -> Channel:
        if self._refusal is not None or self._pool.over:
            raise ClosedError(self._refusal or "mpi: MPI has come to its end on this rank; nothing can be exchanged")
        return (self._back if task.background else self._front)[task.group]
