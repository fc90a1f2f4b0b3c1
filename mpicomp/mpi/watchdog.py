"""Which rank is missing where others wait, and the end of a job in which nobody will ever come.

MPI does not report a rank that never enters a collective. A watchdog thread asks the other ranks' threads how far they
have come, in messages that nobody waits for:

- ranks that have waited for ``MPICOMP_STALL`` seconds (60 if it is not set, 0 for never) learn who is missing, and
  the stacks of all ranks that answer go into a file. Nothing is ended by that: a rank may have a reason, such as
  writing a checkpoint;
- after ``MPICOMP_STALL_END`` seconds (1800 if it is not set, 0 for never) the job ends;
- where a rank has left the program, or has broken off what the others are in the middle of, they would wait forever:
  the job ends with an error;
- so it does within the stall limit where a rank has closed the reducer or the transport that others exchange with. It
  tells them before ``close()`` returns: afterwards it may be in a call that keeps Python's lock, and answer nothing;
- so it does where two ranks wait for each other in different rounds, and nothing has moved for as long again;
- so it does after Ctrl-C where no rank can act on it, because all wait inside MPI.

Without MPI_THREAD_MULTIPLE there is no thread, and whatever waits looks by itself.
"""

import contextlib
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpicomp.errors import RankFailedError
from mpicomp.gpu.cuda import make_current
from mpicomp.job import abort, processors, say
from mpicomp.mpi.failures import completed, failure_of, fault_tolerant

STALL_S = 60.0  # default of MPICOMP_STALL: seconds after which a rank that waits names those that are missing
STALL_END_S = 1800.0  # default of MPICOMP_STALL_END: seconds after which the job ends; torch.distributed has as many
_PARTS = 20  # looks in a stall limit: who is missing is named within a tenth of it, and an answer takes two of them
_ASK_AT = 0.5  # share of the stall limit after which ranks are asked, so that answers are there when it is over
_LONGEST_S = 1.0  # seconds between two looks, at most: a rank that has left is noticed no later
_SOON_S = 0.1  # the same once a rank has left, or has broken something off: the job may have to end
_TURN_S = 0.3  # seconds between ranks with the same message: the first one ends the job before the next prints it
_MOST_TURNS = 10  # ranks from this one on speak at the same time
_INTERRUPT_ASK_S = 1.0  # seconds after Ctrl-C for the main thread to act on it; then the other ranks are asked
_INTERRUPT_END_S = 3.0  # seconds after Ctrl-C within which one of them has to have answered that it acts on it
_HANDOVER_S = 0.05  # seconds that the end of a dropped owner waits for the watching thread to send its notices
_SAME_CALLS = "all ranks have to make the same calls in the same order"

_ASK, _ANSWER, _LEFT, _BROKE, _CLOSED, _STACKS = range(6)  # kinds of messages
_TEXT = 1  # tag of stacks, which are text; other messages have 0
# answers: where a rank is, of a round that one waits in
_THERE, _PAST, _ELSEWHERE, _BUSY, _GONE, _BROKEN = range(6)
_FIELDS = 8  # of a message: kind, channel, round and, of an answer, a WaitState; or kind and a Closing


class RoundCounter(Protocol):
    """Something whose rounds are begun by all of its ranks in one order."""

    key: int
    members: Sequence[int]
    begun: int


class Wait(NamedTuple):
    """A round that this rank waits in."""

    since: float
    channel: RoundCounter
    number: int
    operation: str
    user: int  # see `mpicomp.mpi.Transport.enter`


class WaitState(NamedTuple):
    """Position of another rank, in a round that one waits in and in all others."""

    where: int
    key: int  # channel of the round that it has waited in for longest
    number: int  # round of that channel; 0 while it waits for nothing
    begun: int  # rounds that it has begun on all channels
    interrupted: int  # whether Ctrl-C has come and its main thread has not acted on it


class Closing(NamedTuple):
    """A rank's notice that it begins no more rounds on a set of channels, or none for one user of it."""

    set_number: int
    generation: int  # times that the set had been handed out
    user: int  # 0 for all
    world: int  # rounds that it had begun on the channel of all ranks
    host: int  # ... of its host
    across: int  # ... across hosts

    @property
    def begun(self) -> tuple[int, ...]:
        """Rounds begun on each channel, in the order of their keys."""
        return self[3:]


class Closings(Protocol):
    """Keeps the other ranks' notices."""

    def record_closing(self, rank: int, closing: Closing) -> None:
        """Keep a rank's notice."""

    def closed_by(self, key: int, number: int, user: int) -> set[int]:
        """Return the ranks that will not begin this round of a channel and a user."""


class Inquiry:
    """The answers of other ranks about a round that this rank waits in."""

    def __init__(self, wait: Wait, rank: int) -> None:
        self.wait = wait
        self.others = [other for other in wait.channel.members if other != rank]
        self.asked: set[int] = set()
        self.asked_all = 0
        self.asked_on_interrupt = False
        self.answers: dict[int, WaitState] = {}
        self.shown = False
        self.before: dict[int, WaitState] | None = None  # answers when it was shown

    def of(self, *states: int) -> list[int]:
        """Return the ranks in one of these states."""
        return [rank for rank in self.others if rank in self.answers and self.answers[rank].where in states]


class StallWatchdog:
    """Finds out why a round of some ranks does not end, and answers other ranks' questions.

    ``names`` are the ranks' numbers in MPI.COMM_WORLD, for messages.
    """

    def __init__(self, comm: MPI.Comm, names: Sequence[int], closings: Closings) -> None:
        self.activity: tuple[str, tuple[object, ...]] = "", ()
        """Purpose of the rounds, a text and its values, for messages that are printed."""
        self.seconds = STALL_S
        self.end_s = STALL_END_S
        self.left = False
        self.inside_mpi = False  # whether this rank waits in a blocking call of MPI
        self.failed = False  # whether one of the ranks has died, so that no message arrives any more
        self._comm = comm
        self._names = names
        self._closings = closings
        self._unsent: deque[Closing] = deque()
        self._channels: dict[int, RoundCounter] = {}
        self._waits: dict[Any, Wait] = {}
        self._inquiry: Inquiry | None = None
        self._broken: dict[int, str] = {}
        self._gone: set[int] = set()
        self._breakers: set[int] = set()
        self._sent: list[tuple[MPI.Request, Any]] = []
        self._file: Path | None = None  # that stacks are written to
        self._looked_at = 0.0
        self._lock = threading.RLock()  # for messages of the watching thread and of others

    @property
    def period_s(self) -> float:
        """Seconds between two looks."""
        soon = self._broken or self._breakers or self._gone or lookout.interrupted_s() > 0
        longest = _SOON_S if soon else _LONGEST_S
        return min(self.seconds / _PARTS or longest, longest)

    @property
    def alone(self) -> bool:
        """Whether all other ranks have left and know that this one has, or one has died."""
        return self.failed or (len(self._gone) == self._comm.size - 1 and not self._sent)

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others, in a round or inside of MPI."""
        return bool(self._waits) or self.inside_mpi

    def add(self, channels: Iterable[RoundCounter]) -> None:
        """Answer questions about these."""
        self._channels |= {channel.key: channel for channel in channels}

    def begin(self, what: Any, channel: RoundCounter, number: int, operation: str, user: int = 0) -> None:
        """Note the start of a wait for a round of a channel."""
        if len(channel.members) > 1:
            self._waits[what] = Wait(time.monotonic(), channel, number, operation, user)

    def end(self, what: Any) -> None:
        """Note the end of a wait."""
        self._waits.pop(what, None)

    def forget(self, channels: Collection[RoundCounter]) -> None:
        """Drop all waits on these channels."""
        self._waits = {what: wait for what, wait in dict(self._waits).items() if wait.channel not in channels}

    def abort_exchange(self, channels: Iterable[RoundCounter], why: str) -> None:
        """Begin no more rounds on these channels: a rank that waits there ends the job."""
        with self._lock:
            for channel in channels:
                self._broken.setdefault(channel.key, why)
            self._send_all(_BROKE)
        lookout.wake()

    def close(self, closings: Iterable[Closing], collected: bool) -> None:
        """Send these notices to all other ranks before this returns; it waits for none of them.

        ``collected``: this is called by the garbage collector, perhaps in the middle of a call of MPI.
        """
        self._unsent.extend(closings)
        if not collected:
            with self._noting_death():
                self._send_closings()
        elif lookout.wake():
            deadline = time.monotonic() + _HANDOVER_S
            while self._unsent and time.monotonic() < deadline:
                time.sleep(1e-3)

    def leave(self) -> None:
        """Announce to the other ranks that this rank begins no more rounds."""
        with self._lock, self._noting_death():
            self.left = True
            self._send_all(_LEFT)

    def tick(self) -> None:
        """Look, unless the last look was a moment ago."""
        if time.monotonic() - self._looked_at > self.period_s:
            self.look()

    def look(self) -> None:
        """Answer questions, ask the other ranks about a long wait, and report their answers."""
        with self._noting_death():
            self._look()

    @contextlib.contextmanager
    def _noting_death(self) -> Iterator[None]:
        """Give up after a death: MPI reports it to the ranks that wait."""
        try:
            yield
        except (MPI.Exception, RankFailedError) as error:
            if isinstance(error, MPI.Exception) and failure_of(error) is error:
                raise
            self.failed = True
            lookout.drop(self)

    def _look(self) -> None:
        with self._lock:
            self._looked_at = time.monotonic()
            self._send_closings()
            status = MPI.Status()
            while self._comm.Iprobe(MPI.ANY_SOURCE, 0, status):
                self._receive(status.Get_source())
            while self._comm.Iprobe(MPI.ANY_SOURCE, _TEXT, status):
                text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self._comm.Recv(text, status.Get_source(), _TEXT)
                self._write(text.tobytes().decode(errors="replace"))
            if fault_tolerant():
                done = completed(self._comm, [request for request, _ in self._sent])
                self._sent = [sent for position, sent in enumerate(self._sent) if position not in done]
            else:
                self._sent = [(request, message) for request, message in self._sent if not request.Test()]
            oldest = min(dict(self._waits).values(), key=lambda wait: wait.since, default=None)
            if oldest is None or self.left:
                self._inquiry = None
                return
            if self._inquiry is None or self._inquiry.wait is not oldest:
                self._inquiry = Inquiry(oldest, self._comm.rank)
            self._inquire(self._inquiry)

    def _inquire(self, inquiry: Inquiry) -> None:
        """Find out why a round takes so long."""
        waited, seconds = time.monotonic() - inquiry.wait.since, self.seconds
        self._ask(inquiry, (self._gone | self._breakers).intersection(inquiry.others) - inquiry.asked)
        gone = inquiry.of(_GONE)
        if gone:
            self._end(
                inquiry,
                f"{self._ranks(gone, 'has', 'have')} left the program",
                "where ranks have different numbers of batches, optimizer.join() of docs/pytorch.md serves",
            )
        self._inquire_after_interrupt(inquiry)
        if seconds == 0:
            return
        # Not at once: the error for which a rank has closed it may end the job, and says more.
        closed = self._closed_by(inquiry) if waited > _ASK_AT * seconds else None
        if closed:
            self._end(
                inquiry,
                f"{self._ranks(closed, 'has', 'have')} closed what this exchange belongs to",
                "close() comes after the last step of all ranks; where these have different numbers of batches, "
                "optimizer.join() of docs/pytorch.md serves",
            )
        if waited > (inquiry.asked_all + _ASK_AT) * seconds:
            inquiry.asked_all += 1
            self._ask(inquiry, inquiry.others)
        if not inquiry.shown and waited > seconds:
            inquiry.shown = True
            inquiry.before = dict(inquiry.answers)
            self._show(inquiry)
        elif self.end_s and waited > self.end_s:
            who = self._missing(inquiry)
            self._end(inquiry, f"{who} for more than {self.end_s:g} s", "MPICOMP_STALL_END=0 waits for ever")
        elif inquiry.before is not None and waited > 2 * seconds:
            crossed = self._crossed(inquiry)
            if crossed and inquiry.answers == inquiry.before:
                self._end(inquiry, f"{self._ranks(crossed, 'waits', 'wait')} for something else", _SAME_CALLS)
            inquiry.before = None

    def _closed_by(self, inquiry: Inquiry) -> set[int]:
        wait = inquiry.wait
        return self._closings.closed_by(wait.channel.key, wait.number, wait.user).intersection(inquiry.others)

    def _inquire_after_interrupt(self, inquiry: Inquiry) -> None:
        """End the job after Ctrl-C if no rank acts on it, since Python does so between two instructions only."""
        interrupted_s = lookout.interrupted_s()
        if interrupted_s < _INTERRUPT_ASK_S:
            return
        if not inquiry.asked_on_interrupt:
            inquiry.asked_on_interrupt = True
            inquiry.answers.clear()
            self._ask(inquiry, inquiry.others)
        elif interrupted_s > _INTERRUPT_END_S and all(state.interrupted for state in inquiry.answers.values()):
            closed = self._closed_by(inquiry)
            who = self._ranks(closed, "has", "have") + " closed it" if closed else self._missing(inquiry)
            self._end(inquiry, who, "Ctrl-C, on which no rank could act inside MPI", abort.INTERRUPTED)

    def _crossed(self, inquiry: Inquiry) -> list[int]:
        """Return the ranks that wait for this one in another round than this one waits for them."""
        return [
            rank
            for rank in inquiry.of(_ELSEWHERE)
            if self._channels[inquiry.answers[rank].key].begun < inquiry.answers[rank].number
        ]

    def _show(self, inquiry: Inquiry) -> None:
        if any(state.number > 0 for rank, state in inquiry.answers.items() if rank < self._comm.rank):
            return  # one of those who wait is enough
        self._file = Path(f"mpicomp-stacks-{os.getpid()}.txt").absolute()
        self._write(self._stacks())
        for rank in inquiry.others:
            self._send(rank, _STACKS)
        where = "`py-spy dump --pid` shows where one is"
        if self._file is not None:
            where = f"Stacks of all ranks that answer are in {self._file}"
        self._print(inquiry, f"{self._missing(inquiry)}; {_SAME_CALLS}. {where}; MPICOMP_STALL=0 turns this off")

    def _missing(self, inquiry: Inquiry) -> str:
        """Return who is missing, in words."""
        # A rank that waits elsewhere may wait for the same missing rank, one hop before.
        missing = sorted(set(inquiry.others) - set(inquiry.of(_THERE, _PAST, _ELSEWHERE)))
        crossed = self._crossed(inquiry)
        if missing:
            who = f"{self._ranks(missing)} not there"
        elif crossed:
            who = f"{self._ranks(crossed, 'waits', 'wait')} for something else"
        else:
            who = "all ranks take part, so the network is slow or stuck"
        silent = [rank for rank in missing if rank not in inquiry.answers]
        if silent:
            who += (
                f" ({self._ranks(silent)} not answering: stopped, cut off, or in a long call that keeps Python's lock)"
            )
        return who

    def _stacks(self) -> str:
        """Return the Python stacks of this rank's threads."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"rank {self._names[self._comm.rank]}, process {os.getpid()} on {platform.node()}\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines += [f"thread {names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
        return "".join(lines) + "\n"

    def _write(self, text: str) -> None:
        """Append stacks to the file, as long as that can be written."""
        try:
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(text)
        except OSError:
            self._file = None

    def _print(self, inquiry: Inquiry, text: str) -> None:
        activity, values = self.activity
        doing = f" of {activity % values}" if activity else ""
        waited = time.monotonic() - inquiry.wait.since
        say(
            f"rank {self._names[self._comm.rank]} has waited for {waited:.{0 if waited >= 10 else 1}f} s in "
            f"the {inquiry.wait.operation}{doing}: {text}"
        )

    def _end(self, inquiry: Inquiry, why: str, hint: str, status: int = 1) -> None:
        """End the job from another thread than the waiting one, whose stack is printed."""
        if not abort.wanted():
            if not inquiry.shown:
                inquiry.shown = True
                self._print(inquiry, f"{why} ({hint})")
            return
        turn = sum(rank < self._comm.rank and rank not in self._gone for rank in inquiry.others)
        time.sleep(min(turn, _MOST_TURNS) * _TURN_S)
        self._print(inquiry, f"{why}; ending the job ({hint})")
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None:
            print("Stack of the main thread:\n" + "".join(traceback.format_stack(frame)), file=sys.stderr, flush=True)
        abort.end_job(status)

    def _ask(self, inquiry: Inquiry, ranks: Iterable[int]) -> None:
        for rank in ranks:
            inquiry.asked.add(rank)
            self._send(rank, _ASK, inquiry.wait.channel.key, inquiry.wait.number)

    def _receive(self, other: int) -> None:
        message = np.empty(_FIELDS, np.int64)
        self._comm.Recv(message, other, 0)
        kind, key, number, *fields = message.tolist()
        inquiry = self._inquiry
        if kind == _ASK:
            self._answer(other, key, number)
        elif kind == _STACKS:
            stacks = np.frombuffer(self._stacks().encode(), np.uint8)
            self._sent.append((self._comm.Isend(stacks, other, _TEXT), stacks))
        elif kind == _ANSWER:
            if inquiry is not None and (inquiry.wait.channel.key, inquiry.wait.number) == (key, number):
                inquiry.answers[other] = WaitState(*fields)
        elif kind == _CLOSED:
            self._closings.record_closing(other, Closing(*message[1 : 1 + len(Closing._fields)].tolist()))
        else:
            (self._gone if kind == _LEFT else self._breakers).add(other)
            if inquiry is not None:
                inquiry.asked.discard(other)  # what it answered before is of no use any more

    def _answer(self, other: int, key: int, number: int) -> None:
        waits = sorted(dict(self._waits).values(), key=lambda wait: wait.since)
        rounds = [(wait.channel.key, wait.number) for wait in waits]
        if key in self._channels and self._channels[key].begun >= number:
            answer = _THERE if (key, number) in rounds else _PAST
        elif key in self._broken:
            answer = _BROKEN
        elif self.left:
            answer = _GONE
        else:
            answer = _ELSEWHERE if rounds else _BUSY
        begun = sum(channel.begun for channel in list(self._channels.values()))
        interrupted = lookout.interrupted_s() > 0
        self._send(other, _ANSWER, key, number, *WaitState(answer, *(rounds or [(0, 0)])[0], begun, interrupted))
        if answer == _BROKEN and abort.wanted():
            say(
                f"rank {self._names[self._comm.rank]} broke off what rank {self._names[other]} still waits "
                f"for; ending the job. What broke it off:\n{self._broken[key]}"
            )
            abort.end_job(1)

    def _send_closings(self) -> None:
        with self._lock:
            while self._unsent:
                self._send_all(_CLOSED, *self._unsent[0])
                self._unsent.popleft()  # not before: who waits until it is empty may keep Python's lock afterwards

    def _send_all(self, *fields: int) -> None:
        for other in range(self._comm.size):
            if other != self._comm.rank:
                self._send(other, *fields)

    def _send(self, other: int, *fields: int) -> None:
        message = np.zeros(_FIELDS, np.int64)
        message[: len(fields)] = fields
        self._sent.append((self._comm.Isend(message, other, 0), message))

    def _ranks(self, ranks: Iterable[int], one: str = "is", several: str = "are") -> str:
        names = sorted(self._names[rank] for rank in ranks)
        listed = ", ".join(map(str, names[:8])) + (" ..." if len(names) > 8 else "")
        return f"rank {listed} {one}" if len(names) == 1 else f"ranks {listed} {several}"


class Lookout:
    """The thread that looks, for all watches of the process."""

    def __init__(self) -> None:
        self.watches: list[StallWatchdog] = []
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] | None = None  # a byte wakes the thread: a signal's number, or 0
        self._stopping = False
        self._interrupt: tuple[float, tuple[int, int]] | None = None  # when Ctrl-C came, and where the main thread was

    def add(self, watch: StallWatchdog) -> None:
        """Watch these rounds too."""
        self.watches.append(watch)
        # Open MPI's agreement breaks where another thread moves messages on meanwhile.
        if self._thread is None and MPI.Query_thread() == MPI.THREAD_MULTIPLE and not fault_tolerant():
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._hear_signals(self._pipe[1])
            self._thread = threading.Thread(target=self._run, args=self._pipe[:1], name="mpicomp watch", daemon=True)
            self._thread.start()

    def drop(self, watch: StallWatchdog) -> None:
        """Watch these rounds no longer."""
        if watch in self.watches:
            self.watches.remove(watch)

    def wake(self) -> bool:
        """Have another thread look at once; return whether there is one."""
        if self._pipe is None or self._thread is threading.current_thread():
            return False
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
            os.write(self._pipe[1], b"\0")
        return True

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join()

    def interrupted_s(self) -> float:
        """Return the seconds since Ctrl-C if the main thread has not run since, else 0."""
        if self._interrupt is not None and self._interrupt[1] != _main_position():
            self._interrupt = None
        return 0.0 if self._interrupt is None else time.monotonic() - self._interrupt[0]

    def _hear_signals(self, pipe: int) -> None:
        """Have Python write the numbers of signals there, unless the program uses that (asyncio does)."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        else:
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def _run(self, pipe: int) -> None:
        processors.widen()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while True:
            if poll.poll(1e3 * min((watch.period_s for watch in self.watches), default=_LONGEST_S)):
                interrupted = signal.SIGINT in os.read(pipe, select.PIPE_BUF)
                if interrupted and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    self._interrupt = time.monotonic(), _main_position()
            if self._stopping:
                return
            make_current()
            for watch in list(self.watches):
                watch.look()


def _main_position() -> tuple[int, int]:
    """Return the instruction that the main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


lookout = Lookout()
