"""Generators of rounds that a thread runs, one after the other, while other threads compute.

Non-blocking communication makes little progress by itself: a thread has to ask for it. One that sleeps in between
leaves the core to the computation.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from mpicomp.errors import ClosedError, MpicompError
from mpicomp.job import processors
from mpicomp.mpi.rounds import Pending, Request, Returned, Round, Rounds, advance
from mpicomp.mpi.transport import Backoff, RoundLog, Transport

Value = TypeVar("Value")

drivers: "weakref.WeakSet[_Driver]" = weakref.WeakSet()
"""Those of all threads, which `mpicomp.mpi.end` stops."""

_SHARED_CORES_S = 1e-3  # longest sleep between two tests where ranks share cores, while this rank computes
_SHARED_CORES_YIELDS = 20  # rests there that only yield the core, while this rank waits
_MAX_LEAVE_S = 3.0  # for the thread to stop; it is mostly polling or asleep


class Job(Future[Value]):
    """A future of a generator's value, not to be cancelled; ``log`` has its rounds."""

    def __init__(self, exchange: Rounds[Value], log: list[RoundLog] | None = None) -> None:
        super().__init__()
        self.log = [] if log is None else log
        self.exchange = exchange
        self.set_running_or_notify_cancel()


class ProgressThread:
    """Runs generators of rounds in a thread, on a transport of its own. Collective, as is `submit`.

    Each runs when those before it are done. One that raises has to raise on all ranks; the others still run. While
    nothing moves the thread sleeps, so it takes little of a core. With ``alone`` no other thread makes MPI calls while
    generators run: then a lower thread level is enough. Without the level that it needs it raises `LaunchError`.

    >>> import numpy as np
    >>> from mpicomp.mpi.rounds import Round
    >>> from mpicomp.mpi import LocalWorld
    >>> def total(number):
    ...     send = np.array([number])
    ...     received = yield Round("allreduce", (1,), send.dtype, send=send, recv=np.empty_like(send))
    ...     return received.tolist()
    >>> with ProgressThread(LocalWorld(1).transports[0]) as thread:
    ...     jobs = [thread.submit(total(number)) for number in (1.0, 2.0, 3.0)]
    ...     [job.result() for job in jobs]
    [[1.0], [2.0], [3.0]]
    """

    def __init__(self, transport: Transport, alone: bool = False) -> None:
        transport.check_threads(alone)
        self._driver = _Driver(transport.channel())
        # The thread knows the driver and not this object, which is collected like any other if `stop` is not called.
        self._leave = weakref.finalize(self, self._driver.leave)

    def start(self) -> "ProgressThread":
        """Start the thread; not collective."""
        if self._driver.thread.ident is not None:
            raise MpicompError("progress thread: it is started once; make a new one")
        self._driver.thread.start()
        return self

    def submit(self, exchange: Rounds[Value], log: list[RoundLog] | None = None) -> Job[Value]:
        """Hand a generator, and the arrays of its rounds, to the thread, in the same order on all ranks.

        Its rounds are added to ``log``, by default a list of its own.
        """
        if self._driver.thread.ident is None or self._driver.leaving:
            raise ClosedError("progress thread: it does not run; call start, and submit nothing after stop")
        job = Job(exchange, log)
        self._driver.jobs.append(job)
        self._driver.awake.set()
        return job

    def wait(self, jobs: Iterable[Job[Any]]) -> None:
        """Wait until jobs are done, and raise the first failure. This thread is idle, so the other one sleeps less."""
        self._driver.awaited = True
        try:
            for job in jobs:
                job.result()
        finally:
            self._driver.awaited = False

    def stop(self) -> None:
        """End the thread without waiting for a rank; jobs that are not done fail with `ClosedError`."""
        self._leave()

    def __enter__(self) -> "ProgressThread":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # If this rank alone has failed, the thread waits for rounds that never end.
        if kind is None:
            self._driver.awaited = True
            wait(list(self._driver.jobs))
        self.stop()


class _Driver:
    """The thread of a `ProgressThread`, its transport, and the generators that it runs."""

    def __init__(self, transport: Transport) -> None:
        self.jobs: deque[Job[Any]] = deque()  # those that are not done; the first one is under way
        self.awake = threading.Event()
        self.awaited = False  # whether another thread waits for it and computes nothing
        self.leaving = False
        self._transport = transport
        self._request: Request | None = None  # of the first job, and the started round that the job waits for
        self._pending: Pending | None = None
        self._began = 0.0
        # A daemon: where a program ends without `stop`, Python would wait for other threads before it calls `leave`.
        self.thread = threading.Thread(target=self._run, name="mpicomp progress", daemon=True)
        drivers.add(self)

    def _run(self) -> None:
        processors.widen()
        if self._transport.group.own_cores:
            lazy, eager = Backoff(eager=0), Backoff()
        else:  # each test takes time from a rank that computes
            lazy, eager = Backoff(eager=0, longest=_SHARED_CORES_S), Backoff(eager=_SHARED_CORES_YIELDS)
        while not self.leaving:
            if not self.jobs:
                self.awake.wait()
                self.awake.clear()
            elif self._poll(self.jobs[0]):
                lazy.reset()
                eager.reset()
            else:
                (eager if self.awaited else lazy).rest()

    def leave(self) -> None:
        self.leaving = True
        self.awake.set()
        if self.thread.ident not in (None, threading.get_ident()):  # garbage may be collected in this very thread
            self.thread.join(_MAX_LEAVE_S)
        if not self.thread.is_alive():  # else it may still use the transport
            self._transport.close()
            while self.jobs:
                self.jobs.popleft().set_exception(ClosedError("progress thread: it was stopped before this was done"))

    def _poll(self, job: Job[Any]) -> bool:
        try:
            if self._pending is not None and not self._pending.test():
                return False
            returned = self._advance(job)
        except BaseException as error:  # it is raised where the job's result is asked for
            if not isinstance(error, MpicompError):
                self._transport.abort_exchange(error)
            self._pending = None
            self.jobs.popleft().set_exception(error)
        else:
            if returned is not None:
                self.jobs.popleft().set_result(returned.value)
        return True

    def _advance(self, job: Job[Any]) -> Returned[Any] | None:
        transport = self._transport
        transport.log = job.log
        reply: Any = None
        if self._pending is not None:
            reply = transport.wait(self._pending)
            assert self._request is not None
            transport.note(self._request, self._began, transport.timer())
        self._pending = None
        while self._pending is None:
            request = advance(job.exchange, reply)
            if isinstance(request, Returned):
                return request
            self._began = transport.timer()
            if isinstance(request, Round) and request.background:
                reply = transport.start(request)
                transport.note(request, self._began, self._began)
            else:
                self._request = request
                self._pending = transport.start(request) if isinstance(request, Round) else request
        return None
