"""Rounds on communicators of their own, one for each group that this rank is in."""

import atexit
import time
from collections.abc import Iterable, Mapping
from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from mpicomp.collectives.round import Group, Pending, Round
from mpicomp.errors import LaunchError
from mpicomp.transport.base import Transport, received
from mpicomp.transport.mpi_rounds import Channel, Started
from mpicomp.transport.mpi_watch import Watch
from mpicomp.transport.naps import Naps

_LAST_ROUNDS_S = 3.0  # how long rounds that nobody waited for may take when the transport or the program ends

_under_way: dict[Started, "MPILane"] = {}
"""What was started and not waited for: its arrays are MPI's, whoever has forgotten it."""


class MPILane(Transport):
    """Runs rounds among ranks that know each other already; `MPITransport` is one.

    An MPI call that waits keeps its core busy. Where ranks have a core each that is the fastest way to wait; where
    they share cores it takes them from the ranks that still compute, so there rounds are started without blocking
    and asked for with naps in between.

    Parameters
    ----------
    group : Group
        All ranks.
    front, back : mapping of str to Channel
        The communicators of this rank's groups by name, for rounds that are waited for at once and for those in the
        background, so that these need not begin in one order with the others. The lane frees them.
    naps : bool
        Whether ranks share cores.
    watch : Watch or None
        Is told what is waited for.
    """

    family = "mpi"

    def __init__(
        self,
        group: Group,
        front: Mapping[str, Channel],
        back: Mapping[str, Channel],
        naps: bool,
        watch: Watch | None,
    ) -> None:
        super().__init__()
        self.watch = watch
        self.group = group
        self._front = front
        self._back = back
        self._naps = naps

    def start(self, task: Round) -> Pending:
        """See `Transport.start`."""
        started = self._channel(task).start(task)
        _under_way[started] = self
        if self.watch is not None and not task.background:
            self.watch.begin(started, task.operation)
        return started

    def wait(self, pending: Pending) -> NDArray[Any]:
        """See `Transport.wait`."""
        assert isinstance(pending, Started)
        pending.finish(self._naps)
        _under_way.pop(pending, None)
        if self.watch is not None:
            self.watch.end(pending)
        return received(pending.task)

    def perform(self, task: Round) -> NDArray[Any]:
        """See `Transport.perform`."""
        if self.watch is not None:
            self.watch.begin(self, task.operation)
        self._channel(task).perform(task, self._naps)
        if self.watch is not None:
            self.watch.end(self)
        return received(task)

    def doing(self, what: str) -> None:
        """See `Transport.doing`."""
        if self.watch is not None:
            self.watch.about = what

    def check_threads(self, alone: bool) -> None:
        """See `Transport.check_threads`."""
        provided = MPI.Query_thread()
        if provided < (MPI.THREAD_SERIALIZED if alone else MPI.THREAD_MULTIPLE):
            levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
            raise LaunchError(
                f"mpi: a thread for rounds needs MPI_THREAD_{'SERIALIZED' if alone else 'MULTIPLE'}, and this MPI "
                f"provides MPI_THREAD_{levels[provided]}; set MPI4PY_RC_THREAD_LEVEL=multiple, or run rounds without a "
                "thread"
            )

    def close(self) -> None:
        """Wait a moment for rounds that nobody waited for, and free the communicators. Collective over the group.

        A second call does nothing.
        """
        if MPI.Is_finalized():
            return
        _finish([started for started, lane in list(_under_way.items()) if lane is self])
        for channel in dict.fromkeys([*self._front.values(), *self._back.values()]):
            channel.close()

    def _channel(self, task: Round) -> Channel:
        return (self._back if task.background else self._front)[task.group]


def _finish(rounds: Iterable[Started]) -> None:
    """Complete rounds if it does not take long: MPI cannot end while they are under way."""
    deadline = time.monotonic() + _LAST_ROUNDS_S
    naps = Naps()
    left = list(rounds)
    while left and time.monotonic() < deadline:
        for started in left:
            if started.test():
                del _under_way[started]
                naps.reset()
        left = [started for started in left if started in _under_way]
        naps.rest()


@atexit.register
def _finish_all() -> None:
    """Come before the end of MPI: mpi4py ends it when Python's own exit handlers have run."""
    if not MPI.Is_finalized():
        _finish(list(_under_way))
