"""What a transport is, and what it notes of every round."""

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from mpicomp.collectives.round import Group, Round

Value = TypeVar("Value")


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
        Grows with every round; whoever reads it may clear it.
    """

    group: Group

    def __init__(self) -> None:
        self.log: list[RoundLog] = []

    @abstractmethod
    def perform(self, task: Round) -> NDArray[Any]:
        """Run one round and give ``task.recv``, filled. Collective over the group."""

    def run(self, exchange: Generator[Round, NDArray[Any], Value]) -> Value:
        """Run a generator of rounds to its end and give what it returns. Collective over the group."""
        try:
            task = next(exchange)
            while True:
                start = time.perf_counter()
                received = self.perform(task)
                self.note(task, time.perf_counter() - start)
                task = exchange.send(received)
        except StopIteration as stop:
            value: Value = stop.value
            return value

    def note(self, task: Round, seconds: float) -> None:
        """Write a round to the log."""
        self.log.append(RoundLog(task.operation, task.sent_bytes(self.group), task.wire_bytes(self.group), seconds))

    @abstractmethod
    def hosts(self) -> int:
        """Give the number of hosts that the ranks are on. Collective over the group."""

    def close(self) -> None:  # noqa: B027, a transport may have nothing to give back
        """Give back what the transport holds. Collective over the group."""
