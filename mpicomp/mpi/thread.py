"""Several generators of rounds at once on one transport, driven by the caller that waits for them or by a thread.

Non-blocking communication makes little progress by itself: somebody has to ask for it. A thread that asks and sleeps in
between leaves the core to the computation.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from mpicomp.errors import ClosedError, MpicompError
from mpicomp.job import processors
from mpicomp.mpi.rounds import Pending, Request, Returned, Round, Rounds, advance
from mpicomp.mpi.transport import Naps, RoundLog, Transport

Value = TypeVar("Value")

_drivers: "weakref.WeakSet[_Driver]" = weakref.WeakSet()

CHANNELS = 2  # default number of generators under way at a time: one computes while the other communicates

_LEAVE_S = 3.0  # seconds that the thread may take to stop; it is mostly polling or asleep


class Job(Future[Value]):
    """A future of what a generator returns, not to be cancelled; ``log`` has its rounds."""

    def __init__(self, exchange: Rounds[Value], log: list[RoundLog] | None = None) -> None:
        super().__init__()
        self.log = [] if log is None else log
        self.exchange = exchange
        self.set_running_or_notify_cancel()


class RoundScheduler:
    """Runs several generators of rounds at once, in the calling thread. Collective, as are `submit` and `run`.

    Each has one round under way at a time, besides those in the background. Generators go to ``channels`` in turn;
    those of one channel run one after the other, so all ranks begin the rounds of a channel in one order. A generator
    that raises has to raise on all ranks; the others go on.
    """

    def __init__(self, transport: Transport, channels: int = CHANNELS) -> None:
        self._channels = [_Channel(end) for end in transport.channels(channels)]
        self._submitted = 0

    def submit(self, exchange: Rounds[Value], log: list[RoundLog] | None = None) -> Job[Value]:
        """Put a generator at the end of the next channel, in the same order on all ranks. It does not begin by that."""
        job = Job(exchange, log)
        self._channels[self._submitted % len(self._channels)].jobs.append(job)
        self._submitted += 1
        return job

    def poll(self) -> bool:
        """Move every channel on as far as it goes without waiting; return whether one moved. Not collective."""
        moved = [channel.poll() for channel in self._channels]
        return any(moved)

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted is done."""
        return not any(channel.jobs for channel in self._channels)

    def run(self, exchanges: Iterable[Rounds[Value]]) -> list[Value]:
        """Run generators, and those submitted before; return their values, or raise the first error at the end."""
        jobs = [self.submit(exchange) for exchange in exchanges]
        naps = Naps()
        while not self.idle:
            if self.poll():
                naps.reset()
            else:
                naps.rest()
        return [job.result() for job in jobs]

    def close(self) -> None:
        """Release the channels. It waits for nobody: generators not done then fail with `ClosedError`."""
        for channel in self._channels:
            channel.transport.close()
            while channel.jobs:
                channel.jobs.popleft().set_exception(ClosedError("scheduler: it was closed before this was done"))


class ProgressThread:
    """Runs generators of rounds in a thread, while other threads compute. Collective, as is `submit`.

    While nothing moves it sleeps, so it takes little of a core. With ``alone`` no other thread makes MPI calls while
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

    def __init__(self, transport: Transport, channels: int = CHANNELS, alone: bool = False) -> None:
        transport.check_threads(alone)
        self._driver = _Driver(RoundScheduler(transport, channels))
        self._started = False
        # The thread knows the driver and not this object, which is collected like any other where nobody stops it.
        self._leave = weakref.finalize(self, self._driver.leave)

    def start(self) -> "ProgressThread":
        """Start the thread; not collective."""
        if self._started:
            raise MpicompError("progress thread: it is started once; make a new one")
        self._started = True
        self._driver.thread.start()
        return self

    def submit(self, exchange: Rounds[Value], log: list[RoundLog] | None = None) -> Job[Value]:
        """Hand a generator, and the arrays of its rounds, to the thread, in the same order on all ranks.

        Its rounds are added to ``log``, by default a list of its own.
        """
        if not self._started or self._driver.leaving:
            raise ClosedError("progress thread: it does not run; call start, and submit nothing after stop")
        job = self._driver.scheduler.submit(exchange, log)
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
        # If this rank alone has failed, the thread waits for rounds that never come.
        if kind is None:
            self._driver.finish()
        self.stop()


class _Driver:
    """The thread of a `ProgressThread`, and the loop that it runs."""

    def __init__(self, scheduler: RoundScheduler) -> None:
        self.scheduler = scheduler
        self.awake = threading.Event()
        self.awaited = False
        """Whether another thread waits for it and computes nothing meanwhile."""
        self.leaving = False
        self._idle = threading.Event()
        # A daemon: where a program ends without `stop`, Python would wait for other threads before it calls `leave`.
        self.thread = threading.Thread(target=self._run, name="mpicomp progress", daemon=True)
        _drivers.add(self)

    def _run(self) -> None:
        processors.widen()
        lazy, eager = Naps(eager=0), Naps()
        while not self.leaving:
            if self.scheduler.poll():
                lazy.reset()
                eager.reset()
            elif not self.scheduler.idle:
                (eager if self.awaited else lazy).rest()
            else:
                self._idle.set()
                self.awake.wait()
                self.awake.clear()

    def finish(self) -> None:
        """Wait until everything that was submitted is done."""
        self.awaited = True
        while not self.scheduler.idle:
            self._idle.clear()
            self.awake.set()
            self._idle.wait()

    def leave(self) -> None:
        """Leave everything as it is."""
        self.leaving = True
        self.awake.set()
        if self.thread.ident not in (None, threading.get_ident()):  # garbage may be collected in this very thread
            self.thread.join(_LEAVE_S)
        if not self.thread.is_alive():  # else it may still use the channels
            self.scheduler.close()


def leave_all() -> None:
    """Stop every progress thread, as this process leaves."""
    for driver in list(_drivers):
        driver.leave()


class _Channel:
    """Generators that run one after the other on a transport of their own."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.jobs: deque[Job[Any]] = deque()
        """Those that are not done; the first one is under way."""
        self._pending: Pending | None = None
        self._asked: Request | None = None  # whose end is waited for
        self._began = 0.0

    def poll(self) -> bool:
        """Move the first job on if its round is done, or begin it; return whether it moved."""
        if not self.jobs:
            return False
        job = self.jobs[0]
        try:
            if self._pending is not None and not self._pending.test():
                return False
            returned = self._step(job)
            if returned is not None:
                self._end().set_result(returned.value)
        except BaseException as error:  # it is raised where the job's result is asked for
            if not isinstance(error, MpicompError):
                self.transport.abort_exchange(error)
            self._end().set_exception(error)
        return True

    def _step(self, job: Job[Any]) -> Returned[Any] | None:
        """Take a job to its next round that has to be waited for, or to its end."""
        self.transport.log = job.log
        transport = self.transport
        reply: Any = None
        if self._pending is not None:
            reply = transport.wait(self._pending)
            assert self._asked is not None
            transport.note(self._asked, self._began, transport.timer())
        self._pending = self._asked = None
        while self._pending is None:
            asked = advance(job.exchange, reply)
            if isinstance(asked, Returned):
                return asked
            self._began = transport.timer()
            if isinstance(asked, Round) and asked.background:
                reply = transport.start(asked)
                transport.note(asked, self._began, self._began)
            else:
                self._asked = asked
                self._pending = transport.start(asked) if isinstance(asked, Round) else asked
        return None

    def _end(self) -> Job[Any]:
        self._pending = self._asked = None
        return self.jobs.popleft()
