"""The base class of transports, the log of rounds that each of them keeps, and how a rank waits."""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError, MpicompError, RankFailedError
from mpicomp.mpi.rounds import Group, Pending, Request, Round, Rounds

Value = TypeVar("Value")


@dataclass(eq=False, slots=True)
class RoundLog:
    """A round that was run, or the wait for one in the background, in times of the transport's timer."""

    task: Round
    ranks: Group
    """All ranks, as this one sees them."""
    begin: float
    end: float
    sends: bool = True
    """False where a round that was logged before is waited for."""

    @property
    def operation(self) -> str:
        return self.task.operation

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank passed to the transport."""
        return self.task.sent_bytes(self._group) if self.sends else 0

    @property
    def wire_bytes(self) -> float:
        """Bytes that left this rank."""
        return self.task.wire_bytes(self._group) if self.sends else 0.0

    @property
    def _group(self) -> Group:
        group = self.ranks.part(self.task.group)
        assert group is not None
        return group


class Activity:
    """The purpose of rounds, a text and its values, for messages about ranks that wait."""

    purpose: tuple[str, tuple[object, ...]] = "", ()


class Transport(ABC):
    """Runs rounds for one rank of a group."""

    group: Group
    activity = Activity()
    generation: int = 0  # how often ranks have died and the others have become the group
    family: str | None = None  # transports of one family share measured costs; None: this one shares with no other
    concurrent: bool = True  # whether ranks run side by side, so that one may wait for the others anywhere
    probes: bool = True  # whether time passes in rounds, so that it can be measured
    times_kernels: bool = True
    """Whether time passes between rounds on its clock: on that of a simulated network kernels take none."""
    takes_device_memory: bool = False  # whether rounds may have arrays in GPU memory, as far as this rank knows
    user: int = 0  # number from `enter` of the user that the next rounds belong to; 0 before a call
    timer: Callable[[], float] = time.perf_counter  # returns seconds on this rank's clock
    cores: float = math.inf  # cores for each rank on the host where they are fewest; the same on all ranks
    offset: float = 0.0  # seconds by which the first rank's clock is ahead of this one's
    log: list[RoundLog] | None = None
    """Every round that is run, with its arrays: a list that its reader sets, or None."""

    @abstractmethod
    def start(self, task: Round) -> Pending:
        """Begin a round. Collective over its group."""

    def channel(self) -> "Transport":
        """Return another transport of the same ranks, whose rounds have no order among this one's.

        Collective over the group. The caller closes it.
        """
        raise MpicompError(f"transport: {type(self).__name__} does not run several rounds at once")

    def check_threads(self, alone: bool) -> None:  # noqa: B027, a transport may not mind
        """Raise `LaunchError` where no thread may run rounds; ``alone``: no other thread runs any at the same time."""

    @abstractmethod
    def wait(self, pending: Pending) -> NDArray[Any]:
        """Wait until a round that was begun is done and return its ``recv``, filled."""

    def perform(self, task: Round) -> NDArray[Any]:
        """Run one round and return ``task.recv``, filled. Collective over its group."""
        return self.wait(self.start(task))

    def clock(self) -> float:
        """Return seconds on a clock that is the same on all ranks, as well as `compare_clocks` found out."""
        return self.timer() + self.offset

    def run(self, exchange: Rounds[Value]) -> Value:
        """Run a generator of rounds to its end and return its value; an error of one rank breaks it off. Collective."""
        begun = False
        advance: Callable[[Any], Request] = exchange.send
        reply: Any = None
        timer = self.timer
        try:
            while True:
                try:
                    request = advance(reply)
                except StopIteration as stop:
                    value: Value = stop.value
                    return value
                begun = True
                advance = exchange.send
                begin, task = timer(), request if isinstance(request, Round) else request.task
                try:
                    if task is not request:
                        reply = self.wait(request)  # type: ignore[arg-type]
                    elif task.background:
                        reply = self.start(task)
                    else:
                        reply = self.perform(task)
                except RankFailedError as error:  # the generator may continue with the other ranks
                    advance, reply = exchange.throw, error
                    continue
                if self.log is not None:
                    self.log.append(RoundLog(task, self.group, begin, timer(), task is request))
        except MpicompError:
            raise
        except BaseException as error:
            if begun:
                self.abort_exchange(error)
            raise

    def note(self, request: Request, begin: float, end: float) -> None:
        """Write a round, or the wait for one in the background, to the log, if there is one."""
        if self.log is not None:
            sends = isinstance(request, Round)
            task = request if isinstance(request, Round) else request.task
            self.log.append(RoundLog(task, self.group, begin, end, sends))

    def enter(self) -> int:
        """Return the number of a new user of this transport, the same on all ranks; see `retire`."""
        return 0

    def retire(self, user: int) -> None:  # noqa: B027, ranks of one process do not wait for each other
        """Note that a user runs no more rounds on this rank; not collective."""

    def abort_exchange(self, error: BaseException) -> None:  # noqa: B027, a transport may be one rank's alone
        """Begin no more rounds, as this rank alone failed in the middle of some: others wait, so the job ends."""

    def check_survives(self, subsystem: str) -> None:
        """Raise `ConfigurationError` where the other ranks cannot outlive one that dies."""
        raise ConfigurationError(
            f"{subsystem}: on_failure='shrink' needs ranks that are processes, and {type(self).__name__} has none"
        )

    def revoke(self) -> None:  # noqa: B027, where no rank dies there is nothing to do
        """Have every round that ranks are in, or begin, end with `RankFailedError`; not collective."""

    def agree(self, flag: bool) -> bool:
        """Return whether all ranks pass True, the same on all that are left; False where one has died. Collective."""
        raise MpicompError(f"transport: {type(self).__name__} has no ranks that die")

    def shrink(self) -> list[int]:
        """Become the transport of the ranks that are left, and return the dead ones' numbers in the job. Collective."""
        raise MpicompError(f"transport: {type(self).__name__} has no ranks that die")

    def close(self) -> None:  # noqa: B027, a transport may hold nothing
        """Release the transport's resources. It waits for no rank; a second call does nothing."""


def received(task: Round) -> NDArray[Any]:
    """Return ``task.recv``; an empty array where this rank receives nothing and has none."""
    return np.empty(0, task.dtype) if task.recv is None else task.recv


SHORTEST_S = 50e-6  # seconds of the first sleep
LONGEST_S = 200e-6  # seconds up to which sleeps double


class Backoff:
    """Rests between tests of whether something is done: the core is yielded at first, then sleeps grow."""

    def __init__(self, eager: int = 200, on_wait: Callable[[], None] | None = None, longest: float = LONGEST_S) -> None:
        self._eager = eager  # rests that only yield the core
        self._on_wait = on_wait
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        """Start again: something was done."""
        self._left = self._eager
        self._sleep_s = SHORTEST_S

    def rest(self) -> None:
        if self._left:
            self._left -= 1
            os.sched_yield()
        else:
            if self._on_wait is not None:
                self._on_wait()
            time.sleep(self._sleep_s)
            self._sleep_s = min(2 * self._sleep_s, self._longest)


def wait(done: Callable[[], bool], on_wait: Callable[[], None] | None = None) -> None:
    """Test until something is done, with rests in between."""
    backoff = Backoff(on_wait=on_wait)
    while not done():
        backoff.rest()
