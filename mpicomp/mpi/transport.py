"""The base class of transports, the log of rounds that each of them keeps, and waiting with naps."""

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
        """The operation."""
        return self.task.operation

    @property
    def seconds(self) -> float:
        """Seconds that it took on this rank."""
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


class Transport(ABC):
    """Runs rounds for one rank of a group."""

    group: Group
    generation: int = 0  # how often ranks have died and the group has become that of the others
    family: str | None = None
    """Names transports for which the same holds: what was measured through one is known of others. None: of itself."""
    concurrent: bool = True  # whether the ranks run side by side, so that one may wait for the others wherever it is
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

    def channels(self, count: int) -> "list[Transport]":
        """Return other transports of the same ranks, for rounds at the same time as this one's.

        Collective over the group, as is each start of a round on one of them, in one order on all ranks. Between
        channels there is no order. The caller closes them.
        """
        raise MpicompError(f"transport: {type(self).__name__} does not run several rounds at once")

    def subgroup(self, count: int) -> "Transport | None":
        """Return a transport of the first ranks; None on the others. Collective. The caller closes it."""
        raise MpicompError(f"transport: {type(self).__name__} does not run rounds of some ranks")

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
                except RankFailedError as error:  # the generator may go on with those that are left
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

    def set_activity(self, text: str, *values: object) -> None:  # noqa: B027, a transport may have no watchdog
        """Note the purpose of the rounds, ``text % values``, for messages about ranks that wait."""

    def enter(self) -> int:
        """Return a number for what runs rounds here from now on, the same on all ranks; see `retire`."""
        return 0

    def retire(self, user: int) -> None:  # noqa: B027, ranks of one process do not wait for each other
        """Note that a user runs no more rounds on this rank; not collective."""

    def hosts(self) -> int:
        """Return the number of hosts that the ranks are on."""
        return self.group.hosts

    def abort_exchange(self, error: BaseException) -> None:  # noqa: B027, a transport may be one rank's alone
        """Begin no more rounds, as this rank alone failed in the middle of some: others wait, so the job ends."""

    def check_survives(self, subsystem: str) -> None:
        """Raise `ConfigurationError`, with what to do, where they cannot."""
        raise ConfigurationError(
            f"{subsystem}: on_failure='shrink' needs ranks that are processes, and {type(self).__name__} has none"
        )

    def revoke(self) -> None:  # noqa: B027, where no rank dies there is nothing to do
        """Have every round that ranks are in, or begin, end with `RankFailedError`; not collective."""

    def agree(self, flag: bool) -> bool:
        """Return whether all ranks say so, the same on all that are left; False where one has died. Collective."""
        raise MpicompError(f"transport: {type(self).__name__} has no ranks that die")

    def shrink(self) -> list[int]:
        """Become the transport of the ranks that are left, and return the dead ones' numbers in the job. Collective."""
        raise MpicompError(f"transport: {type(self).__name__} has no ranks that die")

    def close(self) -> None:  # noqa: B027, a transport may hold nothing
        """Release the transport's resources. It waits for nobody; a second call does nothing."""


def received(task: Round) -> NDArray[Any]:
    """Return ``task.recv``; an empty array where this rank receives nothing and has none."""
    return np.empty(0, task.dtype) if task.recv is None else task.recv


SHORTEST_S = 50e-6  # seconds of the first nap
LONGEST_S = 200e-6  # seconds up to which naps double


class Naps:
    """Rests between tests of whether something is done: first the core is yielded to others, then naps grow."""

    def __init__(
        self, eager: int = 200, meanwhile: Callable[[], None] | None = None, longest: float = LONGEST_S
    ) -> None:
        self._eager = eager
        self._meanwhile = meanwhile
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        """Be eager again: something was done."""
        self._left = self._eager
        self._nap = SHORTEST_S

    def rest(self) -> None:
        """Yield the core at first, sleep later."""
        if self._left:
            self._left -= 1
            os.sched_yield()
        else:
            if self._meanwhile is not None:
                self._meanwhile()
            time.sleep(self._nap)
            self._nap = min(2 * self._nap, self._longest)


def wait(done: Callable[[], bool], meanwhile: Callable[[], None] | None = None) -> None:
    """Test until something is done, with naps in between."""
    naps = Naps(meanwhile=meanwhile)
    while not done():
        naps.rest()
