"""N ranks inside one process, in lockstep and without MPI: for tests, simulation and learning.

Each rank is a generator of rounds. All of them are taken to their next round, the round is carried out on
their arrays, and on they go. Sums are in rank order.
"""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.round import Group, Round
from mpicomp.errors import MpicompError
from mpicomp.transport.base import Transport, Value


class LocalTransport(Transport):
    """One rank's side of a `LocalWorld`."""

    def __init__(self, group: Group, hosts: int) -> None:
        super().__init__()
        self.group = group
        self._hosts = hosts

    def perform(self, task: Round) -> NDArray[Any]:
        """Run a round of a world of one rank."""
        if self.group.size > 1:
            raise MpicompError("local transport: several ranks go together; use LocalWorld.run")
        [received] = perform_together([task])
        return received

    def hosts(self) -> int:
        """See `Transport.hosts`."""
        return self._hosts


class LocalWorld:
    """Ranks that live in one process.

    Parameters
    ----------
    size : int
        Number of ranks.
    identical_sums : bool
        False stands for a library whose Allreduce gives different bits on different ranks: schemes then do
        their sums themselves.
    hosts : int
        What `Transport.hosts` is to say.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp import Reducer, TopK
    >>> world = LocalWorld(2)
    >>> reducers = [Reducer(TopK(ratio=0.5), comm=transport) for transport in world.transports]
    >>> gradients = [np.array([4, 1], np.float32), np.array([0, 2], np.float32)]
    >>> means = world.run([r.rounds({"w": g}) for r, g in zip(reducers, gradients)])
    >>> means[0]["w"].tolist(), means[1]["w"].tolist()
    ([2.0, 1.0], [2.0, 1.0])
    >>> reducers[0].residual("w").tolist()
    [0.0, 1.0]
    """

    def __init__(self, size: int, identical_sums: bool = True, hosts: int = 1) -> None:
        self.transports = [LocalTransport(Group(rank, size, identical_sums), hosts) for rank in range(size)]

    def run(self, exchanges: Sequence[Generator[Round, NDArray[Any], Value]]) -> list[Value]:
        """Run one generator a rank to their ends and give what they return, in rank order.

        Raises
        ------
        Exception
            What the first rank that failed raised; the other generators are closed.
        MpicompError
            Where ranks meet in different rounds: over MPI they would wait forever.
        """
        values: list[Value | None] = [None] * len(exchanges)
        received: list[Any] = [None] * len(exchanges)
        while True:
            tasks: list[Round] = []
            failures: list[Exception] = []
            for rank, exchange in enumerate(exchanges):
                try:
                    tasks.append(exchange.send(received[rank]))
                except StopIteration as stop:
                    values[rank] = stop.value
                except Exception as error:
                    failures.append(error)
            if failures:
                for exchange in exchanges:
                    exchange.close()
                failures[0].add_note(f"{len(failures)} of {len(exchanges)} ranks raised")
                raise failures[0]
            if not tasks:
                return values  # type: ignore[return-value]
            if len(tasks) < len(exchanges):
                raise MpicompError(
                    f"local transport: {len(exchanges) - len(tasks)} ranks are done while others still ask for "
                    f"{tasks[0].operation}"
                )
            received = perform_together(tasks)
            for transport, task in zip(self.transports, tasks, strict=True):
                transport.note(task, 0.0)


def perform_together(tasks: Sequence[Round]) -> list[NDArray[Any]]:
    """Carry out one round for all ranks; give their filled ``recv`` arrays in rank order."""
    first = tasks[0]
    for rank, task in enumerate(tasks):
        met = (task.operation, tuple(task.counts), task.dtype, task.root)
        if met != (first.operation, tuple(first.counts), first.dtype, first.root):
            raise MpicompError(f"local transport: rank 0 asks for {first!r:.200} and rank {rank} for {task!r:.200}")
    match first.operation:
        case "allreduce":
            total = first.send.copy()  # type: ignore[union-attr]
            for task in tasks[1:]:
                with np.errstate(over="ignore", invalid="ignore"):
                    total += task.send
            results = [total] * len(tasks)
        case "allgatherv":
            results = [np.concatenate([task.send for task in tasks])] * len(tasks)
        case "bcast":
            results = [tasks[first.root].send] * len(tasks)
        case "alltoallv":
            bounds = np.concatenate(([0], np.cumsum(first.counts)))
            results = [
                np.concatenate([task.send[bounds[rank] : bounds[rank + 1]] for task in tasks])  # type: ignore[index]
                for rank in range(len(tasks))
            ]
        case _:
            raise MpicompError(f"local transport: unknown operation '{first.operation}'")
    received = []
    for task, result in zip(tasks, results, strict=True):
        task.recv[:] = result  # type: ignore[index]
        received.append(task.recv)
    return received  # type: ignore[return-value]
