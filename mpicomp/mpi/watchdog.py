"""Finds the ranks that are missing where others wait, and ends a job whose ranks would wait forever.

MPI does not report a rank that never enters a collective. The watchdogs of all ranks ask each other how far they are:

- ranks that have waited for ``MPICOMP_STALL`` seconds (60 if it is not set, 0 for never) learn who is missing, and
  the stacks of all ranks that answer go into a file. Nothing is ended by that: a rank may have a reason, such as
  writing a checkpoint;
- after ``MPICOMP_STALL_END`` seconds (1800 if it is not set, 0 for never) the job ends;
- if a rank has left the program, or has broken off an exchange that the others are in, they would wait forever:
  the job ends with an error;
- so it does within the stall limit if a rank has closed the reducer or the transport that others exchange with. It
  tells them before ``close()`` returns: afterwards it may be in a call that keeps Python's lock, and answer nothing;
- so it does if two ranks wait for each other in different rounds, and nothing has moved for another stall limit;
- so it does after Ctrl-C if no rank can act on it, because all wait inside MPI.

`Watchdog._verdict` has these rules. The watcher's thread polls the watchdog; without MPI_THREAD_MULTIPLE ranks that
wait poll it. An error on this rank ends the job in `mpicomp.job.abort`, a death that MPI hides in
`mpicomp.mpi.failures`.
"""

import contextlib
import os
import platform
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from mpicomp.errors import RankFailedError
from mpicomp.job import abort, print_stderr
from mpicomp.mpi.channel import Channel
from mpicomp.mpi.channel_sets import Closing, Closings
from mpicomp.mpi.failures import failure_of
from mpicomp.mpi.mailbox import Kind, Mailbox
from mpicomp.mpi.transport import Activity
from mpicomp.mpi.watcher import watcher

STALL_S = 60.0  # default of MPICOMP_STALL: seconds after which a rank that waits names those that are missing
STALL_END_S = 1800.0  # default of MPICOMP_STALL_END: seconds after which the job ends, as in torch.distributed
_POLLS = 20  # in a stall limit: who is missing is named within a tenth of it, and an answer takes two polls
_ASK_AT = 0.5  # share of the stall limit after which ranks are asked, so that answers are there when it is over
_MAX_PERIOD_S = 1.0  # a rank that has left is noticed no later
_URGENT_PERIOD_S = 0.1  # once a rank has left or has broken off an exchange: the job may have to end
_TURN_S = 0.3  # seconds between ranks with the same message: the first one ends the job before the next prints it
_MAX_TURNS = 10  # ranks from this one on print at the same time
_INTERRUPT_ASK_S = 1.0  # seconds after Ctrl-C for the main thread to act on it; then the other ranks are asked
_INTERRUPT_END_S = 3.0  # seconds after Ctrl-C within which one of them must have answered that it acts on it
_HANDOVER_S = 0.05  # seconds that the end of a dropped owner waits for the watcher to send its notices
_SAME_CALLS = "all ranks have to make the same calls in the same order"


class RankState(IntEnum):
    """Where another rank is, of a round that this one waits in."""

    WAITS_HERE = 0
    IS_PAST = 1
    WAITS_ELSEWHERE = 2
    COMPUTES = 3
    LEFT = 4  # the program
    BROKE_OFF = 5  # the exchange, by an error of its own


class Wait(NamedTuple):
    """A round that this rank waits in; a plain tuple is noted, since every round makes one."""

    since: float
    channel: Channel
    number: int
    operation: str
    user: int  # see `mpicomp.mpi.Transport.enter`


class Position(NamedTuple):
    """A rank's answer: its state in the round that it was asked about, and its position in all others."""

    state: int
    key: int  # channel of the round that it has waited in for longest
    number: int  # round of that channel; 0 while it waits for nothing
    begun: int  # rounds that it has begun on all channels
    interrupted: int  # whether its main thread has not yet acted on Ctrl-C


class Verdict(NamedTuple):
    """A reason to end the job."""

    why: str
    hint: str
    status: int = 1


class Inquiry:
    """The answers of other ranks about a round that this rank waits in."""

    def __init__(self, wait: Wait, rank: int) -> None:
        self.wait = wait
        self.others = [other for other in wait.channel.members if other != rank]
        self.asked: set[int] = set()
        self.times_asked_all = 0
        self.asked_on_interrupt = False
        self.answers: dict[int, Position] = {}
        self.shown = False
        self.answers_when_shown: dict[int, Position] | None = None

    def ranks_in(self, *states: RankState) -> list[int]:
        return [rank for rank in self.others if rank in self.answers and self.answers[rank].state in states]


class Watchdog:
    """Finds out why a round of some ranks does not end, and answers other ranks' questions.

    ``names`` are the ranks' numbers in MPI.COMM_WORLD, for messages.
    """

    def __init__(self, comm: MPI.Comm, names: Sequence[int], closings: Closings) -> None:
        self.activity = Activity()
        self.waits: dict[Any, tuple[Any, ...]] = {}
        """Fields of a `Wait` for each round that this rank waits in, by its waiter."""
        self.stall_s = STALL_S
        self.end_s = STALL_END_S
        self.left = False
        self.inside_mpi = False  # whether this rank waits in a blocking call of MPI
        self.failed = False  # whether one of the ranks has died, so that no message arrives any more
        self._mailbox = Mailbox(comm)
        self._names = names
        self._closings = closings
        self._unsent: deque[Closing] = deque()
        self._channels: dict[int, Channel] = {}
        self._inquiry: Inquiry | None = None
        self._broken: dict[int, str] = {}  # channels whose exchange has failed on this rank, and the error
        self._departed: dict[int, Kind] = {}  # ranks that left or broke off
        self._stacks_file: Path | None = None
        self._polled_at = 0.0
        self._lock = threading.RLock()  # for messages of the watcher's thread and of others

    @property
    def period_s(self) -> float:
        urgent = self._broken or self._departed or watcher.interrupted_s() > 0
        longest = _URGENT_PERIOD_S if urgent else _MAX_PERIOD_S
        return min(self.stall_s / _POLLS or longest, longest)

    @property
    def alone(self) -> bool:
        """Whether all other ranks have left and know that this one has, or one has died."""
        left = sum(kind == Kind.LEFT for kind in self._departed.values())
        return self.failed or (left == self._mailbox.size - 1 and not self._mailbox.unsent)

    def add(self, channels: Iterable[Channel]) -> None:
        """Answer questions about these."""
        self._channels |= {channel.key: channel for channel in channels}

    def forget(self, channels: Collection[Channel]) -> None:
        """Drop all waits on these channels."""
        for waiter, wait in list(self.waits.items()):
            if Wait(*wait).channel in channels:
                self.waits.pop(waiter, None)

    def abort_exchange(self, channels: Iterable[Channel], why: str) -> None:
        """Begin no more rounds on these channels: the job ends when a rank asks for one."""
        with self._lock:
            for channel in channels:
                self._broken.setdefault(channel.key, why)
            self._mailbox.send_all(Kind.BROKE_OFF)
        watcher.wake(self)

    def announce(self, closings: Iterable[Closing], collected: bool) -> None:
        """Send these notices to all other ranks before this returns, without waiting for any.

        ``collected``: this is called by the garbage collector, perhaps in the middle of a call of MPI.
        """
        self._unsent.extend(closings)
        if not collected:
            with self._record_failure():
                self._send_closings()
        elif watcher.wake(self):
            deadline = time.monotonic() + _HANDOVER_S
            while self._unsent and time.monotonic() < deadline:
                time.sleep(1e-3)

    def leave(self) -> None:
        """Announce to the other ranks that this rank begins no more rounds."""
        with self._lock, self._record_failure():
            self.left = True
            self._mailbox.send_all(Kind.LEFT)

    def poll_if_due(self) -> None:
        if time.monotonic() - self._polled_at > self.period_s:
            self.poll()

    def poll(self) -> None:
        """Answer questions, ask the other ranks about a long wait, and act on their answers."""
        with self._record_failure(), self._lock:
            self._polled_at = time.monotonic()
            self._send_closings()
            for other, kind, fields in self._mailbox.receive():
                self._receive(other, kind, fields)
            for text in self._mailbox.receive_texts():
                self._write_stacks(text)
            self._mailbox.release_sent()
            waits = self._waits_by_age()
            if not waits or self.left:
                self._inquiry = None
                return
            if self._inquiry is None or self._inquiry.wait != waits[0]:
                self._inquiry = Inquiry(waits[0], self._mailbox.rank)
            self._inquire(self._inquiry)

    def _waits_by_age(self) -> list[Wait]:
        waits = [Wait(*wait) for wait in list(self.waits.values())]
        return sorted((wait for wait in waits if len(wait.channel.members) > 1), key=lambda wait: wait.since)

    @contextlib.contextmanager
    def _record_failure(self) -> Iterator[None]:
        try:
            yield
        except (MPI.Exception, RankFailedError) as error:
            if isinstance(error, MPI.Exception) and failure_of(error) is error:
                raise
            self.failed = True  # MPI reports a death to the ranks that wait
            watcher.drop(self)

    # Messages

    def _receive(self, other: int, kind: Kind, fields: Sequence[int]) -> None:
        inquiry = self._inquiry
        match kind:
            case Kind.QUESTION:
                self._answer(other, *fields[:2])
            case Kind.WANTS_STACKS:
                self._mailbox.send_text(other, self._stacks())
            case Kind.ANSWER:
                if inquiry is not None and [inquiry.wait.channel.key, inquiry.wait.number] == fields[:2]:
                    inquiry.answers[other] = Position(*fields[2:])
            case Kind.CLOSED:
                self._closings.record(other, Closing(*fields[: len(Closing._fields)]))
            case _:
                self._departed[other] = kind
                if inquiry is not None:
                    inquiry.asked.discard(other)  # its earlier answer is of no use any more

    def _answer(self, other: int, key: int, number: int) -> None:
        rounds = [(wait.channel.key, wait.number) for wait in self._waits_by_age()]
        if key in self._channels and self._channels[key].begun >= number:
            state = RankState.WAITS_HERE if (key, number) in rounds else RankState.IS_PAST
        elif key in self._broken:
            state = RankState.BROKE_OFF
        elif self.left:
            state = RankState.LEFT
        else:
            state = RankState.WAITS_ELSEWHERE if rounds else RankState.COMPUTES
        begun = sum(channel.begun for channel in list(self._channels.values()))
        position = Position(state, *(rounds or [(0, 0)])[0], begun, watcher.interrupted_s() > 0)
        self._mailbox.send(other, Kind.ANSWER, key, number, *position)
        if state == RankState.BROKE_OFF and abort.wanted():
            print_stderr(
                f"rank {self._names[self._mailbox.rank]} broke off a round in which rank {self._names[other]} "
                f"still waits; ending the job. The cause:\n{self._broken[key]}"
            )
            abort.end_job(1)

    def _ask(self, inquiry: Inquiry, ranks: Iterable[int]) -> None:
        for rank in ranks:
            inquiry.asked.add(rank)
            self._mailbox.send(rank, Kind.QUESTION, inquiry.wait.channel.key, inquiry.wait.number)

    def _send_closings(self) -> None:
        with self._lock:
            while self._unsent:
                self._mailbox.send_all(Kind.CLOSED, *self._unsent[0])
                self._unsent.popleft()  # not before: who waits until it is empty may keep Python's lock afterwards

    # Decisions

    def _inquire(self, inquiry: Inquiry) -> None:
        waited_s = time.monotonic() - inquiry.wait.since
        self._ask(inquiry, set(self._departed).intersection(inquiry.others) - inquiry.asked)
        if self.stall_s and waited_s > (inquiry.times_asked_all + _ASK_AT) * self.stall_s:
            inquiry.times_asked_all += 1
            self._ask(inquiry, inquiry.others)
        if not inquiry.asked_on_interrupt and watcher.interrupted_s() > _INTERRUPT_ASK_S:
            inquiry.asked_on_interrupt = True
            inquiry.answers.clear()
            self._ask(inquiry, inquiry.others)
        verdict = self._verdict(inquiry, waited_s)
        if verdict is not None:
            self._act_on(verdict, inquiry)
        elif self.stall_s and waited_s > self.stall_s and not inquiry.shown:
            inquiry.shown = True
            inquiry.answers_when_shown = dict(inquiry.answers)
            self._report(inquiry)

    def _verdict(self, inquiry: Inquiry, waited_s: float) -> Verdict | None:
        left = inquiry.ranks_in(RankState.LEFT)
        if left:
            hint = "where ranks have different numbers of batches, optimizer.join() of docs/pytorch.md serves"
            return Verdict(f"{self._ranks(left, 'has', 'have')} left the program", hint)
        wait = inquiry.wait
        closed = self._closings.closed_by(wait.channel.key, wait.number, wait.user).intersection(inquiry.others)
        # Python acts on Ctrl-C between two instructions only.
        acts = not all(position.interrupted for position in inquiry.answers.values())
        if inquiry.asked_on_interrupt and not acts and watcher.interrupted_s() > _INTERRUPT_END_S:
            who = self._ranks(closed, "has", "have") + " closed it" if closed else self._missing(inquiry)
            return Verdict(who, "Ctrl-C, on which no rank could act inside MPI", abort.INTERRUPTED)
        # Not at once: the error for which a rank has closed it may end the job, and explains more.
        if closed and waited_s > _ASK_AT * self.stall_s > 0:
            return Verdict(
                f"{self._ranks(closed, 'has', 'have')} closed its reducer or transport",
                "close() comes after the last step of all ranks; where these have different numbers of batches, "
                "optimizer.join() of docs/pytorch.md serves",
            )
        is_reported = inquiry.shown or waited_s <= self.stall_s
        if self.stall_s and is_reported and self.end_s and waited_s > self.end_s:
            who = self._missing(inquiry)
            return Verdict(f"{who} for more than {self.end_s:g} s", "MPICOMP_STALL_END=0 waits for ever")
        if self.stall_s and waited_s > 2 * self.stall_s and inquiry.answers == inquiry.answers_when_shown:
            crossed = self._crossed(inquiry)
            if crossed:
                return Verdict(f"{self._ranks(crossed, 'waits', 'wait')} for something else", _SAME_CALLS)
        return None

    def _act_on(self, verdict: Verdict, inquiry: Inquiry) -> None:
        if not abort.wanted():
            if not inquiry.shown:
                inquiry.shown = True
                self._print(inquiry, f"{verdict.why} ({verdict.hint})")
            return
        turn = sum(rank < self._mailbox.rank and self._departed.get(rank) != Kind.LEFT for rank in inquiry.others)
        time.sleep(min(turn, _MAX_TURNS) * _TURN_S)
        self._print(inquiry, f"{verdict.why}; ending the job ({verdict.hint})")
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None:
            print("Stack of the main thread:\n" + "".join(traceback.format_stack(frame)), file=sys.stderr, flush=True)
        abort.end_job(verdict.status)

    def _crossed(self, inquiry: Inquiry) -> list[int]:
        # They wait for this rank in another round than it waits for them.
        return [
            rank
            for rank in inquiry.ranks_in(RankState.WAITS_ELSEWHERE)
            if self._channels[inquiry.answers[rank].key].begun < inquiry.answers[rank].number
        ]

    # Reports

    def _report(self, inquiry: Inquiry) -> None:
        if any(position.number > 0 for rank, position in inquiry.answers.items() if rank < self._mailbox.rank):
            return  # the first of those that wait reports
        self._stacks_file = Path(f"mpicomp-stacks-{os.getpid()}.txt").absolute()
        self._write_stacks(self._stacks())
        for rank in inquiry.others:
            self._mailbox.send(rank, Kind.WANTS_STACKS)
        where = "`py-spy dump --pid` shows where one is"
        if self._stacks_file is not None:
            where = f"Stacks of all ranks that answer are in {self._stacks_file}"
        self._print(inquiry, f"{self._missing(inquiry)}; {_SAME_CALLS}. {where}; MPICOMP_STALL=0 turns this off")

    def _missing(self, inquiry: Inquiry) -> str:
        # A rank that waits elsewhere may wait for the same missing rank, one hop before.
        present = inquiry.ranks_in(RankState.WAITS_HERE, RankState.IS_PAST, RankState.WAITS_ELSEWHERE)
        missing = sorted(set(inquiry.others) - set(present))
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
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"rank {self._names[self._mailbox.rank]}, process {os.getpid()} on {platform.node()}\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines += [f"thread {names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
        return "".join(lines) + "\n"

    def _write_stacks(self, text: str) -> None:
        try:
            if self._stacks_file is not None:
                with self._stacks_file.open("a") as file:
                    file.write(text)
        except OSError:
            self._stacks_file = None

    def _print(self, inquiry: Inquiry, text: str) -> None:
        text_of_purpose, values = self.activity.purpose
        doing = f" of {text_of_purpose % values}" if text_of_purpose else ""
        waited_s = time.monotonic() - inquiry.wait.since
        print_stderr(
            f"rank {self._names[self._mailbox.rank]} has waited for {waited_s:.{0 if waited_s >= 10 else 1}f} s in "
            f"the {inquiry.wait.operation}{doing}: {text}"
        )

    def _ranks(self, ranks: Iterable[int], one: str = "is", several: str = "are") -> str:
        names = sorted(self._names[rank] for rank in ranks)
        listed = ", ".join(map(str, names[:8])) + (" ..." if len(names) > 8 else "")
        return f"rank {listed} {one}" if len(names) == 1 else f"ranks {listed} {several}"
