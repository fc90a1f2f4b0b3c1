"""Rounds on a communicator: each becomes collective calls, or messages between pairs of ranks."""

import functools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomp.errors import RankFailedError
from mpicomp.mpi.failures import completed, failure_of, fault_tolerant, kept
from mpicomp.mpi.rounds import Pending, Round
from mpicomp.mpi.transport import Backoff, wait

SEGMENT = 1 << 19
"""Bytes of one message between two ranks: longer arrays go in several, so that the first can be worked on."""

# Segments under way at a time: all of them at once would share the link, and all arrive last.
_RECEIVES = 8  # segments received at a time
_SENDS = 4  # segments sent at a time
# While more are to come than are under way no caller waits for the next one: to test for it more often takes the core
# from the ranks that share it, and gained nothing at 100 Mbit/s, at 1 Gbit/s and in shared memory.
_EAGER = 20  # rests that only yield the core after one has arrived
_LONGEST_S = 1e-3  # seconds up to which sleeps double
_TAGS = 1 << 15  # number of tags in use: every MPI has at least as many

_Segment = tuple[int, slice]  # the other rank, and the part of the array
_CollectiveCalls = list[tuple[str, tuple[Any, ...]]]  # names and arguments
_Some = Callable[[list[MPI.Request]], list[int] | None]


class StartedRound(Pending):
    """A round whose requests were made. Only one thread at a time may ask for it."""

    def __init__(self, task: Round) -> None:
        self.task = task
        self.some: _Some = MPI.Request.Testsome
        self.number = 0  # number of the round on its channel, from 1
        # Rounds under way on its channel, this one among them: a test of one advances all. Empty where it is alone: a
        # reference to itself would keep its arrays until Python looks for cycles.
        self.under_way: Collection[StartedRound] = ()

    def test(self) -> bool:
        try:
            for other in self.under_way:
                if other is not self:
                    other._advance(other.some)
            return self._advance(self.some)
        except MPI.Exception as error:
            raise failure_of(error) from None

    def finish(self, sleeps: bool, on_wait: Callable[[], None] | None = None) -> None:
        """Wait until it is done: asleep (see `Backoff`), or inside MPI, which is faster and keeps the core busy."""
        if sleeps:
            near, far = Backoff(on_wait=on_wait), Backoff(_EAGER, on_wait, _LONGEST_S)
            before = None
            while not self.test():
                left = sum(started.left for started in self.under_way or (self,))
                rests = far if left > _RECEIVES + _SENDS else near
                if left != before:
                    rests.reset()  # the next message begins with a handshake, which must not be slept through
                    before = left
                rests.rest()
            return
        # MPI waits for one round alone, and the others have to advance.
        try:
            while not (self.test() if len(self.under_way) > 1 else self._advance(MPI.Request.Waitsome)):
                pass
        except MPI.Exception as error:
            raise failure_of(error) from None

    @property
    @abstractmethod
    def left(self) -> int:
        """Number of calls or messages that are not complete."""

    @abstractmethod
    def _advance(self, some: _Some) -> bool:
        """Note requests that ``some`` finds complete; return whether none is left."""


class Channel:
    """A communicator on which rounds are run: all of its ranks begin them in the same order."""

    def __init__(self, comm: MPI.Comm, limit: int, key: int, members: Sequence[int]) -> None:
        self.comm = comm
        self.key = key
        self.members = members
        self.begun = 0
        self._limit = limit
        self._survives = fault_tolerant()
        self._under_way: dict[StartedRound, None] = {}  # their arrays are MPI's, even if callers have dropped them

    def perform(self, task: Round, sleeps: bool, on_wait: Callable[[], None] | None = None) -> None:
        """Run a round; see `StartedRound.finish` for the other parameters. Collective."""
        self.begun += 1
        try:
            made = task.calls_made
            if made is not None and made[0] is self and made[1] is task.send and made[2] is task.recv:
                calls = made[3]
            else:
                calls = self._calls(task)
                if task.operation != "bcast":  # whose root copies its array each time
                    task.calls_made = self, task.send, task.recv, calls
            if calls is None:
                started = self._send_messages(task)
                try:
                    started.finish(sleeps, on_wait)
                except RankFailedError:
                    kept.append(started)
                    raise
                return
            for name, arguments in calls:
                if sleeps:
                    self._wait_asleep(getattr(self.comm, f"I{name.lower()}")(*arguments), task, on_wait)
                else:
                    getattr(self.comm, name)(*arguments)
        except MPI.Exception as error:
            raise failure_of(error) from None

    def _wait_asleep(self, request: MPI.Request, task: Round, on_wait: Callable[[], None] | None) -> None:
        try:
            wait((lambda: bool(completed(self.comm, [request]))) if self._survives else request.Test, on_wait)
        except (MPI.Exception, RankFailedError):
            kept.append((request, task))
            raise

    def start(self, task: Round) -> StartedRound:
        """Begin a round. Collective."""
        self.begun += 1
        try:
            calls = self._calls(task)
            if calls is None:
                started: StartedRound = self._send_messages(task)
            else:
                requests = [getattr(self.comm, f"I{name.lower()}")(*arguments) for name, arguments in calls]
                started = _Calls(task, requests)
        except MPI.Exception as error:
            raise failure_of(error) from None
        if self._survives:
            started.some = functools.partial(completed, self.comm)
        started.number = self.begun
        started.under_way = self._under_way
        self._under_way[started] = None
        return started

    def forget(self, started: StartedRound) -> None:
        """Release a round that a caller has waited for."""
        self._under_way.pop(started, None)

    def progress(self) -> bool:
        """Advance the rounds that no caller waits for; return whether none is left."""
        for started in list(self._under_way):
            if started.test():
                self.forget(started)
        return not self._under_way

    def _send_messages(self, task: Round) -> StartedRound:
        messages = [started for started in self._under_way if isinstance(started, _Messages)]
        ahead = messages[-1] if messages else None
        made = _Messages(task, self.comm, self.begun % _TAGS, *self._messages(task), ahead)
        if self._survives:
            made.some = functools.partial(completed, self.comm)
        return made

    def _calls(self, task: Round) -> _CollectiveCalls | None:
        """Return names and arguments of collective calls, the same calls on all ranks; None where messages serve."""
        # If a rank dies, Open MPI's calls free messages that then fail, and end the job.
        if self._survives and task.operation != "allreduce":
            return None
        send: Any = task.send
        recv: Any = task.recv
        counts, root = task.counts, task.root
        fits = sum(counts) * task.dtype.itemsize <= self._limit  # no displacement may pass the limit either
        match task.operation:
            case "allreduce" if fits and send.size == recv.size == counts[0] > 0:
                return [("Allreduce", (MPI.IN_PLACE if send is recv else send, recv))]
            case "allreduce":
                parts = self._cuts(task, 0, counts[0])
                return [("Allreduce", (MPI.IN_PLACE if send is recv else send[part], recv[part])) for part in parts]
            case "bcast":
                if self.comm.rank == root:
                    recv[:] = send
                return [("Bcast", (recv[part], root)) for part in self._cuts(task, 0, counts[0])]
            case "allgatherv" if fits and min(counts) == max(counts):
                return [("Allgather", (send, recv))]
            case "allgatherv" if fits:
                return [("Allgatherv", (send, [recv, counts]))]
            case "gatherv" if fits and min(counts) == max(counts):
                return [("Gather", (send, recv if self.comm.rank == root else None, root))]
            case "gatherv" if fits:
                return [("Gatherv", (send, [recv, counts] if self.comm.rank == root else None, root))]
            case "alltoallv" if task.received is None:
                rank, size = self.comm.rank, self.comm.size
                # The same on every rank, as the branch must be.
                if max(sum(counts), max(counts) * size) * task.dtype.itemsize <= self._limit:
                    return [("Alltoallv", ([send, counts], [recv, [counts[rank]] * size]))]
        return None

    def _messages(self, task: Round) -> tuple[Iterator[_Segment], Iterator[_Segment]]:
        """Return the receives and the sends, in an order in which every message meets its counterpart."""
        rank, size, counts = self.comm.rank, self.comm.size, task.counts
        send: Any = task.send
        recv: Any = task.recv
        # At any time every rank sends to one and receives from one.
        behind = [(rank - shift) % size for shift in range(1, size)]
        ahead = [(rank + shift) % size for shift in range(1, size)]
        incoming: list[tuple[int, int, int]] = []  # the other rank, start, stop
        outgoing: list[tuple[int, int, int]] = []
        match task.operation:
            case "allgatherv" | "gatherv":
                bounds = _bounds(counts)
                gathers = task.operation == "allgatherv" or rank == task.root
                if gathers:
                    recv[bounds[rank] : bounds[rank + 1]] = send
                    incoming = [(other, bounds[other], bounds[other + 1]) for other in behind]
                receivers = ahead if task.operation == "allgatherv" else [] if gathers else [task.root]
                outgoing = [(other, 0, counts[rank]) for other in receivers]
            case "bcast" if rank == task.root:
                recv[:] = send
                outgoing = [(other, 0, counts[0]) for other in ahead]
            case "bcast":
                incoming = [(task.root, 0, counts[0])]
            case "sendrecv":
                to, source = task.peers
                incoming = [] if source is None else [(source, 0, counts[1])]
                outgoing = [] if to is None else [(to, 0, counts[0])]
            case "alltoallv":
                out, into = _bounds(counts), _bounds(task.received or [counts[rank]] * size)
                recv[into[rank] : into[rank + 1]] = send[out[rank] : out[rank + 1]]
                incoming = [(other, into[other], into[other + 1]) for other in behind]
                outgoing = [(other, out[other], out[other + 1]) for other in ahead]
        return self._segments(task, incoming), self._segments(task, outgoing)

    def _segments(self, task: Round, spans: Sequence[tuple[int, int, int]]) -> Iterator[_Segment]:
        return ((other, part) for other, start, stop in spans for part in self._cuts(task, start, stop, SEGMENT))

    def _cuts(self, task: Round, start: int, stop: int, largest: int | None = None) -> list[slice]:
        """Cut a span of elements in parts whose bytes stay below the limit, and below ``largest``."""
        nbytes = self._limit if largest is None else min(largest, self._limit)
        step = max(1, nbytes // task.dtype.itemsize)
        return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


class _Calls(StartedRound):
    """Collective calls under way."""

    def __init__(self, task: Round, requests: list[MPI.Request]) -> None:
        super().__init__(task)
        self._requests = requests

    @property
    def left(self) -> int:
        return len(self._requests)

    def _advance(self, some: _Some) -> bool:
        if self._requests and some(self._requests):
            self._requests = [request for request in self._requests if request != MPI.REQUEST_NULL]
        return not self._requests


class _Messages(StartedRound):
    """Segments under way between pairs of ranks, a few at a time, first those of the round ``ahead``, begun before."""

    def __init__(
        self,
        task: Round,
        comm: MPI.Comm,
        tag: int,
        incoming: Iterator[_Segment],
        outgoing: Iterator[_Segment],
        ahead: "_Messages | None",
    ) -> None:
        super().__init__(task)
        self._ahead = ahead
        self._comm = comm
        self._tag = tag
        self._incoming = deque(incoming)
        self._outgoing = deque(outgoing)
        self._requests: list[MPI.Request] = []
        self._parts: list[slice | None] = []  # that each request receives; None if it sends
        self._receives = 0
        self._post()

    @property
    def left(self) -> int:
        return len(self._requests) + len(self._incoming) + len(self._outgoing)

    def _post(self) -> None:
        """Keep as many segments under way as there may be."""
        if self._ahead is not None and (self._ahead._incoming or self._ahead._outgoing):
            return
        self._ahead = None
        send, recv = self.task.send, self.task.recv
        while self._incoming and self._receives < _RECEIVES:
            source, part = self._incoming.popleft()
            assert recv is not None
            self._requests.append(self._comm.Irecv(recv[part], source, self._tag))
            self._parts.append(part)
            self._receives += 1
        while self._outgoing and len(self._requests) - self._receives < _SENDS:
            to, part = self._outgoing.popleft()
            assert send is not None
            self._requests.append(self._comm.Isend(send[part], to, self._tag))
            self._parts.append(None)

    def _advance(self, some: _Some) -> bool:
        if self._ahead is not None:
            self._post()
        done = sorted(some(self._requests) or (), reverse=True) if self._requests else []
        if done:
            arrived = []
            for place in done:
                del self._requests[place]
                part = self._parts.pop(place)
                if part is not None:
                    self._receives -= 1
                    arrived.append(part)
            self._post()  # before the work, so that the link is not idle during it
            if self.task.arrived is not None:
                for part in reversed(arrived):
                    self.task.arrived(part.start, part.stop)
        return self.left == 0


def _bounds(counts: Sequence[int]) -> list[int]:
    bounds: list[int] = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).tolist()
    return bounds
