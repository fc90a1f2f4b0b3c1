"""End the whole job when one rank fails, so that the others do not wait for it forever; `install` sets the hooks.

Covered are uncaught exceptions in any thread, and ``sys.exit``, ``exit`` and ``quit`` with a status other than 0 on
some of the ranks, unless all leave so within a second. A ``raise SystemExit(3)`` written out, or a ``sys.exit`` that
was looked up before this module was imported, is not seen in time: start such a program with ``python -m mpi4py``.
``MPICOMP_ABORT=0`` in the environment turns all of it off.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import contextlib
import faulthandler
import functools
import hashlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpicomp.errors import MpicompError
from mpicomp.job import launcher, print_stderr, variables

GRACE_S = 1.0  # seconds that a rank which leaves with an error waits for the others to do the same
LAST_WORDS_S = 0.25  # seconds for the launcher to pass on the last prints: it drops the rest
INTERRUPTED = 130  # exit status that a shell reports after SIGINT
LIMIT_S = 10.0  # seconds after which a rank that tries to end the job is killed
_STATUS: Any = SystemExit.__dict__["code"]  # where a SystemExit keeps it
_TAG = 32749  # below the 32767 that every MPI must allow

_installed_in: int | None = None  # the process that installed the hooks; a forked child is another one
_all_leave: bool | None = None  # whether all ranks have announced that they leave; None before a barrier
_pending: list[Any] = []  # requests, and buffers that MPI may still read

leaves_alone = False  # whether this rank leaves with an error while others continue
ranks_died = False  # whether a rank of this job has died and this one has continued without it
status = 0  # exit status of this process; known when the interpreter begins to exit


def communicator_alive() -> Any:
    """Return ``mpi4py.MPI`` if it is initialized and not finalized, else None; it is looked up, not imported."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi


def install() -> bool:
    """Set the hooks that end the job when this rank fails, once MPI is up and has several ranks; return whether."""
    global _installed_in
    if not wanted():
        return False
    if _installed_in == os.getpid():
        return True
    import mpi4py.MPI  # noqa: F401  (this initialises MPI, unless the program has turned that off)

    mpi = communicator_alive()
    if mpi is None or mpi.COMM_WORLD.Get_size() == 1:
        return False
    _installed_in = os.getpid()
    sys.excepthook = functools.partial(_on_exception, sys.excepthook)
    threading.excepthook = functools.partial(_on_exception_in_thread, threading.excepthook)
    _replace_exit()
    return True


def crash_at_once() -> None:
    """Let a crash end this process, with Python's traceback: Open MPI's handlers may deadlock inside ``malloc``."""
    if faulthandler.is_enabled() or threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE):
        if signal.getsignal(number) in (signal.SIG_DFL, None):  # Python does not see a handler that C code has set
            signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(file=sys.__stderr__ or 2)


def end_job(status: int) -> None:
    """End every rank of the job with this status; without MPI running, return."""
    mpi = communicator_alive()
    if mpi is None:
        return
    for stream in (sys.stdout, sys.stderr):
        # A stream that is closed or broken must not keep the job from ending.
        with contextlib.suppress(Exception):
            stream.flush()
    if isinstance(sys.stderr, io.StringIO):
        # The hook of torch.distributed collects the text of this one, and would pass it on too late.
        with contextlib.suppress(Exception):
            print(sys.stderr.getvalue(), end="", file=sys.__stderr__, flush=True)
    # MPI_Abort may itself get stuck behind another thread's call. This timer needs neither the interpreter
    # nor its lock.
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__ or 2)
    time.sleep(LAST_WORDS_S)
    mpi.COMM_WORLD.Abort(status)
    # MPICH tells the launcher and returns. Until the launcher's signal comes, this thread must not go on.
    time.sleep(LIMIT_S)
    os._exit(status)


def timed_barrier(
    note: bytes = b"", limit_s: float = GRACE_S, enough: Callable[[dict[int, bytes]], bool] = lambda notes: False
) -> dict[int, bytes]:
    """Announce that this rank leaves with an error; return the notes of those that do the same soon. Not collective."""
    global _all_leave
    mpi = communicator_alive()
    if mpi is None:
        return {}
    comm = mpi.COMM_WORLD
    size, rank = comm.Get_size(), comm.Get_rank()
    notes = {rank: note}
    _all_leave = False
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE and threading.active_count() > 1:
        return notes
    for peer in range(size):
        if peer != rank:
            _pending.append((note, comm.Isend([note, mpi.BYTE], dest=peer, tag=_TAG)))
    deadline = time.monotonic() + limit_s
    state = mpi.Status()
    while len(notes) < size and not enough(notes):
        if comm.Iprobe(source=mpi.ANY_SOURCE, tag=_TAG, status=state):
            received = bytearray(state.Get_count(mpi.BYTE))
            comm.Recv([received, mpi.BYTE], source=state.Get_source(), tag=_TAG)
            notes[state.Get_source()] = bytes(received)
        elif time.monotonic() > deadline:
            return notes
        else:
            time.sleep(0.001)
    _all_leave = len(notes) == size
    return notes


def wanted() -> bool:
    """Return whether the job is to be ended where a rank fails: ``MPICOMP_ABORT`` is not off."""
    return variables.flag_or_none("MPICOMP_ABORT") is not False


def _here() -> bool:
    # A forked child must not call MPI.
    return _installed_in == os.getpid() and communicator_alive() is not None


def _announce(text: str) -> None:
    comm = communicator_alive().COMM_WORLD
    with contextlib.suppress(Exception):
        print_stderr(f"rank {comm.Get_rank()} of {comm.Get_size()}: {text}")


def _on_exception(
    previous: Callable[..., Any], kind: type[BaseException], value: BaseException, traceback: TracebackType | None
) -> None:
    if not _here():
        previous(kind, value, traceback)
        return
    try:
        first = rank = communicator_alive().COMM_WORLD.Get_rank()
        shared = issubclass(kind, MpicompError)  # all ranks may raise it
        text = f"{kind.__name__}: {value}" if shared else ""
        mine = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        if shared and rank > 0:
            notes = timed_barrier(mine, enough=lambda notes: notes.get(0) == mine)
            first = min(other for other, note in notes.items() if note == mine)
        if first == rank:
            _announce("uncaught exception, ending the job")
            previous(kind, value, traceback)
            if shared:
                timed_barrier(mine)  # the others compare theirs with it before the job ends
        else:
            _announce(f"the same {kind.__name__} as on rank {first}, ending the job")
    finally:
        end_job(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def _on_exception_in_thread(previous: Callable[..., Any], arguments: threading.ExceptHookArgs) -> None:
    # SystemExit ends a thread and nothing else.
    if not _here() or issubclass(arguments.exc_type, SystemExit):
        previous(arguments)
        return
    try:
        name = arguments.thread.name if arguments.thread else "unknown"
        _announce(f"uncaught exception in thread {name}, ending the job")
        previous(arguments)
    finally:
        end_job(1)


class _Exit(SystemExit):
    """A SystemExit that knows when the interpreter acts on it: it reads the status when every frame is gone."""

    @property
    def code(self) -> Any:
        code = _STATUS.__get__(self)
        if sys._getframe().f_back is None:
            _leave(code)
        return code

    @code.setter
    def code(self, value: Any) -> None:
        _STATUS.__set__(self, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def _exit(status: Any = None, /) -> NoReturn:
    # Only the main thread ends the program. In the others, threading looks for this very class, not for ours.
    kind = _Exit if threading.current_thread() is threading.main_thread() else SystemExit
    # Like the original: a tuple is the arguments, not the status.
    raise kind(*status) if isinstance(status, tuple) else kind(status)


def _leave(code: Any) -> None:
    # The interpreter begins to exit.
    global status, leaves_alone
    status = code & 0xFF if isinstance(code, int) else 0 if code is None else 1
    if status == 0 or _all_leave or not _here():
        return
    mpi = communicator_alive()
    everyone = False
    try:
        everyone = _all_leave is None and not ranks_died and len(timed_barrier()) == mpi.COMM_WORLD.Get_size()
        if not everyone:
            leaves_alone = True
            _announce(f"left with status {status} while other ranks go on, ending the job")
            # mpi4py ends the job with this status where it would wait for the others in MPI_Finalize.
            mpi._set_abort_status(status)
            # This handler comes after a message that is the status has been printed, and before the end.
            atexit.register(time.sleep, LAST_WORDS_S)
    finally:
        if not everyone:
            # An exit handler or a thread that waits for the other ranks would keep it from getting there.
            timer = threading.Timer(GRACE_S, end_job, [status])
            timer.daemon = True
            timer.start()


def _replace_exit() -> None:
    sys.exit = _exit
    # exit() and quit() raise the SystemExit of their own module. Nothing is caught there.
    _sitebuiltins.SystemExit = _Exit  # type: ignore[attr-defined]


_launch = launcher.detect()
if _launch is not None and _launch.size > 1 and wanted():
    _replace_exit()
