"""The thread that polls every watchdog of the process, and knows whether the main thread can act on Ctrl-C."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from typing import Protocol

from mpicomp.gpu.cuda import make_current
from mpicomp.job import processors

_MAX_PERIOD_S = 1.0


class Watched(Protocol):
    """Something that is polled."""

    @property
    def period_s(self) -> float:
        """Seconds until the next poll."""

    def poll(self) -> None: ...


class Watcher:
    """Starts its thread when something is first watched."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] | None = None  # a byte wakes the thread: a signal's number, or 0
        self._stopping = False
        self._interrupt: tuple[float, tuple[int, int]] | None = (
            None  # time of Ctrl-C, and the main thread's instruction
        )

    def add(self, watched: Watched) -> None:
        self._watched.append(watched)
        if self._thread is None:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._hear_signals(self._pipe[1])
            self._thread = threading.Thread(target=self._run, args=self._pipe[:1], name="mpicomp watch", daemon=True)
            self._thread.start()

    def drop(self, watched: Watched | None) -> None:
        if watched in self._watched:
            self._watched.remove(watched)

    def wake(self, watched: Watched) -> bool:
        """Have the thread poll at once; return whether it polls this, and another thread than it asks."""
        if self._pipe is None or self._thread is threading.current_thread():
            return False
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
            os.write(self._pipe[1], b"\0")
        return watched in self._watched

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        if self._pipe is not None and self._thread is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe[1], b"\0")
            self._thread.join()

    def interrupted_s(self) -> float:
        """Return the seconds since Ctrl-C if the main thread has not run since, else 0."""
        if self._interrupt is not None and self._interrupt[1] != _main_position():
            self._interrupt = None
        return 0.0 if self._interrupt is None else time.monotonic() - self._interrupt[0]

    def _hear_signals(self, pipe: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        if before != -1:  # the program uses it, as asyncio does
            signal.set_wakeup_fd(before)
        else:
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def _run(self, pipe: int) -> None:
        processors.widen()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while True:
            if poll.poll(1e3 * min((watched.period_s for watched in list(self._watched)), default=_MAX_PERIOD_S)):
                interrupted = signal.SIGINT in os.read(pipe, select.PIPE_BUF)
                if interrupted and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    self._interrupt = time.monotonic(), _main_position()
            if self._stopping:
                return
            make_current()
            for watched in list(self._watched):
                watched.poll()


def _main_position() -> tuple[int, int]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


watcher = Watcher()
