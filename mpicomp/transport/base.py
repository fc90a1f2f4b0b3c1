"""What a transport is, and what it notes of every round."""

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from mpicomp.collectives.round import Group, Pending, Round

Value = TypeVar("Value")

Asked = Round | Pending
"""What a generator may yield: a round to be run or started, or one that was started and is now waited for."""


@dataclass(frozen=True)
class RoundLog:
    """One round that was run: its operation, this rank's bytes, and the seconds that it took here."""

    operation: str
    sent_bytes: int
    wire_bytes: float
    seconds: float


class Transport(ABC):
    """Runs rounds for one rank of a group.

    Attributes
    ----------
    group : Group
        All ranks.
    log : list of RoundLog
        Grows with every round but those in the background; whoever reads it may clear it.
    """

    group: Group

    def __init__(self) -> None:
        self.log: list[RoundLog] = []

    @abstractmethod
    def start(self, task: Round) -> Pending:
        """Begin a round. Collective over its group."""

    @abstractmethod
    def wait(self, pending: Pending) -> NDArray[Any]:
        """Wait until a round that was begun is done and give its ``recv``, filled."""

    def perform(self, task: Round) -> NDArray[Any]:
        """Run one round and give ``task.recv``, filled. Collective over its group."""
        return self.wait(self.start(task))

    def clock(self) -> float:
        """Give seconds on a clock that is the same on all ranks, as well as their clocks could be compared."""
        return time.perf_counter()

    def run(self, exchange: Generator[Asked, Any, Value]) -> Value:
        """Run a generator of rounds to its end and give what it returns. Collective over the group."""
        try:
            asked = next(exchange)
            while True:
                asked = exchange.send(self._answer(asked))
        except StopIteration as stop:
            value: Value = stop.value
            return value

    def _answer(self, asked: Asked) -> Any:
        if isinstance(asked, Pending):
            return self.wait(asked)
        if asked.background:
            return self.start(asked)
        start = time.perf_counter()
        received = self.perform(asked)
        self.note(asked, time.perf_counter() - start)
        return received

    def note(self, task: Round, seconds: float) -> None:
        """Write a round to the log."""
        group = self.group.part(task.group)
        assert group is not None
        self.log.append(RoundLog(task.operation, task.sent_bytes(group), task.wire_bytes(group), seconds))

    def hosts(self) -> int:
        """Give the number of hosts that the ranks are on."""
        return self.group.hosts

    def close(self) -> None:  # noqa: B027, a transport may have nothing to give back
        """Give back what the transport holds. Collective over the group."""
