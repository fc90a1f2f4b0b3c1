"""Rounds on a communicator: each becomes collective calls, or messages between pairs of ranks."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from mpi4py import MPI

from mpicomp import kernels
from mpicomp.mpi.failures import completed, failure_of, fault_tolerant
from mpicomp.mpi.rounds import Pending, Round
from mpicomp.mpi.shared_memory import SharedMemory
from mpicomp.mpi.transport import Backoff

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
    """A round whose requests were made; only one thread at a time may ask for it.

    It consists of collective calls, one after the other where they come from ``calls``, or of segments between pairs of
    ranks. A few segments are under way at a time, after those of the round that has begun before.
    """

    def __init__(
        self,
        task: Round,
        channel: "Channel",
        requests: Sequence[MPI.Request] = (),
        incoming: Iterable[_Segment] = (),
        outgoing: Iterable[_Segment] = (),
        calls: Iterable[MPI.Request] = (),
    ) -> None:
        self.task = task
        self.channel = channel
        self.number = channel.begun
        """Number of the round on its channel, from 1."""
        self._some: _Some = functools.partial(completed, channel.comm) if fault_tolerant() else MPI.Request.Testsome
        self._ahead = next((other for other in reversed(channel.under_way) if not other.is_posted), None)
        self._incoming, self._outgoing = deque(incoming), deque(outgoing)
        self._requests = list(requests)
        self._parts: list[slice | None] = [None] * len(requests)  # that each request receives, if it does
        self._receives = 0
        self._calls = iter(calls)
        self._post()

    @property
    def is_posted(self) -> bool:
        """Whether MPI has all of its calls and messages."""
        return not self._incoming and not self._outgoing

    @property
    def left(self) -> int:
        """Number of calls or messages that are not complete."""
        return len(self._requests) + len(self._incoming) + len(self._outgoing)

    def test(self) -> bool:
        try:
            for other in self.channel.under_way:  # the others have to advance
                if other is not self:
                    other._advance(other._some)
            return self._advance(self._some)
        except MPI.Exception as error:
            raise failure_of(error) from None

    def finish(self, sleeps: bool, on_wait: Callable[[], None] | None = None) -> None:
        """Wait until it is done: asleep (see `Backoff`), or inside MPI, which is faster and keeps the core busy."""
        if sleeps:
            near, far = Backoff(on_wait=on_wait), Backoff(_EAGER, on_wait, _LONGEST_S)
            rests, before = near, -1
            while not self.test():
                if self.channel.completed != before:
                    before = self.channel.completed
                    left = sum(started.left for started in self.channel.under_way)
                    rests = far if left > _RECEIVES + _SENDS else near
                    rests.reset()  # the next message begins with a handshake, which must not be slept through
                rests.rest()
            return
        try:
            # MPI waits for one round alone.
            while not (self.test() if len(self.channel.under_way) > 1 else self._advance(MPI.Request.Waitsome)):
                pass
        except MPI.Exception as error:
            raise failure_of(error) from None

    def _post(self) -> None:
        if self._ahead is not None and not self._ahead.is_posted:
            return
        self._ahead = None
        comm, tag = self.channel.comm, 1 + self.number % (_TAGS - 1)
        send: Any = self.task.send
        recv: Any = self.task.recv
        while self._incoming and self._receives < _RECEIVES:
            source, part = self._incoming.popleft()
            self._requests.append(comm.Irecv(recv[part], source, tag))
            self._parts.append(part)
            self._receives += 1
        while self._outgoing and len(self._requests) - self._receives < _SENDS:
            to, part = self._outgoing.popleft()
            self._requests.append(comm.Isend(send[part], to, tag))
            self._parts.append(None)

    def _advance(self, some: _Some) -> bool:
        if self._ahead is not None:
            self._post()
        if self._requests:
            done = some(self._requests)
            if not done:
                return False
            self.channel.completed += len(done)
            arrived = []
            for place in sorted(done, reverse=True):
                del self._requests[place]
                part = self._parts.pop(place)
                if part is not None:
                    self._receives -= 1
                    arrived.append(part)
            self._post()  # before the work, so that the link is not idle during it
            if self.task.arrived is not None:
                for part in reversed(arrived):
                    self.task.arrived(part.start, part.stop)
        if self.left > 0:
            return False
        for request in self._calls:
            self._requests.append(request)
            self._parts.append(None)
            return False
        return True


class Channel:
    """A communicator on which rounds are run: all of its ranks begin them in the same order."""

    def __init__(
        self, comm: MPI.Comm, limit: int, key: int, members: Sequence[int], memory: SharedMemory | None = None
    ) -> None:
        self.comm = comm
        self.memory = memory
        """That the ranks share, if they are on one host."""
        self.key = key
        self.members = members
        self.begun = 0
        self.completed = 0  # calls and messages
        self._limit = limit
        self.under_way: dict[StartedRound, None] = {}  # their arrays are MPI's, even if callers have dropped them

    def start(self, task: Round) -> StartedRound:
        """Begin a round. Collective.

        On memory of a device a collective call blocks: Open MPI has no non-blocking sum of it, and its other
        non-blocking collectives do not take it in all versions.
        """
        self.begun += 1
        try:
            memory = self.memory_for(task)
            calls = None if memory or task.operation == "sendrecv" else self.calls(task)
            if memory is not None:
                started = StartedRound(task, self, calls=memory.sum(task, self.comm.Ibarrier))
            elif calls is None:
                started = StartedRound(task, self, (), *self._messages(task))
            elif task.lends_device_memory:
                for name, arguments in calls:
                    getattr(self.comm, name)(*arguments)
                started = StartedRound(task, self)
            else:
                requests = [getattr(self.comm, f"I{name.lower()}")(*arguments) for name, arguments in calls]
                started = StartedRound(task, self, requests, calls=self.rest_of_sum(task, self.comm.Iallreduce))
        except MPI.Exception as error:
            raise failure_of(error) from None
        self.under_way[started] = None
        return started

    def rest_of_sum(self, task: Round, allreduce: Callable[..., Any]) -> Iterator[Any]:
        """Multiply the sum that MPI made by its factor, and sum the flags; yield the call, to be waited for."""
        if task.factor != 1:
            recv: Any = task.recv
            task.finite = kernels.scale(recv, task.factor)
            if task.flags is not None:
                yield allreduce(MPI.IN_PLACE, task.flags)

    def memory_for(self, task: Round) -> SharedMemory | None:
        """Return the memory in which ranks sum the arrays of a round; None where MPI does."""
        if self.memory is None or task.operation != "allreduce" or not self.memory.takes(task):
            return None
        return self.memory

    def forget(self, started: StartedRound) -> None:
        """Release a round that a caller has waited for."""
        self.under_way.pop(started, None)

    def progress(self) -> bool:
        """Advance the rounds that no caller waits for; return whether none is left."""
        for started in list(self.under_way):
            if started.test():
                self.forget(started)
        return not self.under_way

    def calls(self, task: Round) -> _CollectiveCalls | None:
        """Return names and arguments of collective calls, the same calls on all ranks; None where messages serve."""
        # If a rank dies, Open MPI's calls free messages that then fail, and end the job.
        if fault_tolerant() and task.operation != "allreduce":
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
        rank, size, counts = self.comm.rank, self.comm.size, task.counts
        send: Any = task.send
        recv: Any = task.recv
        # At any time every rank sends to one and receives from one, and every message meets its counterpart.
        behind = [(rank - shift) % size for shift in range(1, size)]
        ahead = [(rank + shift) % size for shift in range(1, size)]
        incoming: list[tuple[int, int, int]] = []  # the other rank, start, stop
        outgoing: list[tuple[int, int, int]] = []
        match task.operation:
            case "allgatherv" | "gatherv":
                bounds = list(accumulate(counts, initial=0))
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
                received = task.received or [counts[rank]] * size
                out, into = (list(accumulate(numbers, initial=0)) for numbers in (counts, received))
                recv[into[rank] : into[rank + 1]] = send[out[rank] : out[rank + 1]]
                incoming = [(other, into[other], into[other + 1]) for other in behind]
                outgoing = [(other, out[other], out[other + 1]) for other in ahead]
        segments = (
            ((other, part) for other, start, stop in spans for part in self._cuts(task, start, stop, SEGMENT))
            for spans in (incoming, outgoing)
        )
        return next(segments), next(segments)

    def _cuts(self, task: Round, start: int, stop: int, largest: int | None = None) -> list[slice]:
        """Cut a span of elements in parts whose bytes stay below the limit, and below ``largest``."""
        nbytes = self._limit if largest is None else min(largest, self._limit)
        step = max(1, nbytes // task.dtype.itemsize)
        return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]
