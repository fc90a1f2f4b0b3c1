"""N ranks inside one process, in lockstep and without MPI: for tests, simulation and learning."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import MpicompError
from mpicomp.mpi.rounds import Group, Pending, Returned, Round, Rounds, advance, layout_groups, parts_of
from mpicomp.mpi.transport import Transport, Value, received

Network = Callable[[Round, Group], float]  # returns the seconds that a round takes a group


class _Done(Pending):
    """A round in lockstep is done when all ranks have asked for it."""

    def __init__(self, task: Round, end: float = 0.0) -> None:
        self.task = task
        self.end = end

    def test(self) -> bool:
        return True


class LocalTransport(Transport):
    """One rank's side of a `LocalWorld`."""

    concurrent = False

    def __init__(self, group: Group, members: dict[str, tuple[int, ...]], network: Network | None) -> None:
        self.log = []
        self.group = group
        self.members = members
        self.network = network
        if network is not None:
            self.timer = lambda: self.seconds  # simulated time
        self.probes = network is not None
        self.times_kernels = network is None
        self.seconds = 0.0
        """This rank's time on the clock of a simulated network."""
        self.busy_until = 0.0
        """When its rounds in the background end on that clock: they pass its link one after the other."""

    def start(self, task: Round) -> Pending:
        """Run a round of a world of one rank."""
        if self.group.size > 1:
            raise MpicompError("local transport: several ranks go together; use LocalWorld.run")
        perform_together([task])
        return _Done(task)

    def channel(self) -> Transport:
        return LocalTransport(self.group, self.members, self.network)

    def wait(self, pending: Pending) -> NDArray[Any]:
        return received(pending.task)


class LocalWorld:
    """Ranks that live in one process.

    Parameters
    ----------
    size : int
        Number of ranks.
    identical_sums : bool
        False stands for a library whose Allreduce gives different bits on different ranks: schemes then do
        their sums themselves.
    hosts : int or sequence of int
        On how many hosts they are, the first ranks on the first; or the host of each rank, by number.
    network : callable, optional
        Returns the seconds that a round, the first argument, takes a group, the second one: the ranks' clocks then
        show these and nothing else.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp import Reducer, TopK
    >>> world = LocalWorld(2)
    >>> reducers = [Reducer(TopK(ratio=0.5), comm=transport, policy={"warmup": 0}) for transport in world.transports]
    >>> gradients = [np.array([4, 1], np.float32), np.array([0, 2], np.float32)]
    >>> means = world.run([r.rounds({"w": g}) for r, g in zip(reducers, gradients)])
    >>> means[0]["w"].tolist(), means[1]["w"].tolist()
    ([2.0, 1.0], [2.0, 1.0])
    >>> reducers[0].residual("w").tolist()
    [0.0, 1.0]
    """

    def __init__(
        self, size: int, identical_sums: bool = True, hosts: int | Sequence[int] = 1, network: Network | None = None
    ) -> None:
        layout = hosts if not isinstance(hosts, int) else np.repeat(range(hosts), parts_of(size, hosts)).tolist()
        self.transports = [
            LocalTransport(*layout_groups(layout, rank, identical_sums), network) for rank in range(size)
        ]

    def run(self, exchanges: Sequence[Rounds[Value]]) -> list[Value]:
        """Run one generator a rank to their ends and return their values, in rank order.

        Raises
        ------
        Exception
            The error of the first rank that failed; the other generators are closed.
        MpicompError
            Where ranks meet in different rounds: over MPI they would wait forever.
        """
        values: list[Value | None] = [None] * len(exchanges)
        replies: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
        asked: dict[int, Round] = {}
        began: dict[int, tuple[Round, float]] = {}  # rounds that were asked for, and when
        failures: dict[int, Exception] = {}
        while replies:
            for rank, reply in replies.items():
                end = self.transports[rank]
                if rank in began:
                    end.note(*began.pop(rank), end.timer())
                try:
                    ask = advance(exchanges[rank], reply)
                    while isinstance(ask, _Done):
                        begin = end.timer()
                        end.seconds = max(end.seconds, ask.end)
                        end.note(ask, begin, end.timer())
                        ask = advance(exchanges[rank], received(ask.task))
                except Exception as error:
                    failures[rank] = error
                    continue
                if isinstance(ask, Returned):
                    values[rank] = ask.value
                else:
                    assert isinstance(ask, Round)
                    asked[rank], began[rank] = ask, (ask, end.timer())
            replies = self._perform_met(asked)
        if failures:
            for exchange in exchanges:
                exchange.close()
            first = failures[min(failures)]
            first.add_note(f"{len(failures)} of {len(exchanges)} ranks raised")
            raise first
        if asked:
            first_asked = asked[min(asked)]
            raise MpicompError(
                f"local transport: {len(exchanges) - len(asked)} ranks are done while others still ask for "
                f"{first_asked.operation} ('{first_asked.group}', rank {min(asked)})"
            )
        return values  # type: ignore[return-value]

    def _perform_met(self, asked: dict[int, Round]) -> dict[int, Any]:
        replies: dict[int, Any] = {}
        members_of = {rank: self.transports[rank].members[task.group] for rank, task in asked.items()}
        for rank in sorted(asked):
            members = members_of[rank]
            if any(other not in asked or members_of[other] != members for other in members):
                continue
            tasks = [asked.pop(other) for other in members]
            perform_together(tasks)
            end = self._pass_time(members, tasks[0])
            for other, task in zip(members, tasks, strict=True):
                replies[other] = _Done(task, end) if task.background else received(task)
        return replies

    def _pass_time(self, members: Sequence[int], task: Round) -> float:
        ends = [self.transports[rank] for rank in members]
        network, group = ends[0].network, ends[0].group.part(task.group)
        if network is None:
            return 0.0
        assert group is not None
        after = max(end.seconds for end in ends)
        if task.background:
            after = max(after, *(end.busy_until for end in ends))
        after += network(task, group)
        for end in ends:
            if task.background:
                end.busy_until = after
            else:
                end.seconds = after
        return after


def perform_together(tasks: Sequence[Round]) -> None:
    """Run one round for all ranks of a group: fill their ``recv`` arrays."""
    first = tasks[0]
    for rank, task in enumerate(tasks):
        if _shared(task) != _shared(first):
            raise MpicompError(f"local transport: rank 0 asks for {first!r:.200} and rank {rank} for {task!r:.200}")
    ranks = range(len(tasks))
    results: list[Any]
    match first.operation:
        case "allreduce":
            total = first.send.copy()  # type: ignore[union-attr]
            for task in tasks[1:]:
                with np.errstate(over="ignore", invalid="ignore"):
                    total += task.send
            results = [total] * len(tasks)
        case "allgatherv":
            results = [np.concatenate([task.send for task in tasks])] * len(tasks)
        case "gatherv":
            whole = np.concatenate([task.send for task in tasks])
            results = [whole if rank == first.root else None for rank in ranks]
        case "bcast":
            results = [tasks[first.root].send] * len(tasks)
        case "alltoallv":
            sent = [np.split(task.send, np.cumsum(task.counts)[:-1]) for task in tasks]  # type: ignore[arg-type]
            parts = [[of_rank[rank] for of_rank in sent] for rank in ranks]
            for rank, task in enumerate(tasks):
                expected = [task.counts[rank]] * len(tasks) if task.received is None else list(task.received)
                if [part.size for part in parts[rank]] != expected:
                    raise MpicompError(
                        f"local transport: rank {rank} expects other counts than are sent: {task!r:.200}"
                    )
            results = [np.concatenate(part) for part in parts]
        case "sendrecv":
            results = [_sent_to(rank, tasks) for rank in ranks]
        case _:
            raise MpicompError(f"local transport: unknown operation '{first.operation}'")
    for task, result in zip(tasks, results, strict=True):
        if result is not None:
            task.recv[:] = result  # type: ignore[index]
            if task.arrived is not None and result.size > 0:
                task.arrived(0, result.size)


def _shared(task: Round) -> tuple[Any, ...]:
    common = (task.operation, task.dtype, task.root, task.background, task.group)
    differ = task.operation == "sendrecv" or task.received is not None
    return common if differ else (*common, tuple(task.counts))


def _sent_to(rank: int, tasks: Sequence[Round]) -> NDArray[Any] | None:
    source = tasks[rank].peers[1]
    for other, task in enumerate(tasks):
        if (task.peers[0] == rank) != (other == source):
            raise MpicompError(f"local transport: ranks {other} and {rank} do not mean the same: {task!r:.200}")
    if source is None:
        return None
    if tasks[source].counts[0] != tasks[rank].counts[1]:
        raise MpicompError(f"local transport: rank {source} sends another count than rank {rank} expects")
    return tasks[source].send
