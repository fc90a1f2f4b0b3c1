"""What a rank notes of its steps while a trace is written, and its own file of that.

A step is noted as a plain tuple, and some at a time are pickled: to make events in JSON of them takes ten times as
long, and is done in the end.
"""

import functools
import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicomp.errors import ConfigurationError
from mpicomp.rounds import WORLD, Group, Request, Round, layout_groups

if TYPE_CHECKING:
    from mpicomp.reducer.exchange import Exchanged

OF_ALL = ("allreduce", "allgatherv", "alltoallv")  # every rank hears from every other


Span = tuple[Request, float, float]
"""What an exchange has asked for, and from when to when it waited for it, on a transport's clock."""


class NotedRound(NamedTuple):
    """A round, in seconds of the trace's clock.

    Attributes
    ----------
    operation : str
        Of MPI.
    about : dict
        What `partners` returns.
    begin, end : float
        When the exchange waited for it.
    begun : float
        When this rank had begun it: before that, where it was in the background.
    """

    operation: str
    about: dict[str, Any]
    begin: float
    end: float
    begun: float


class NotedBucket(NamedTuple):
    """A bucket's exchange: its beginning on the trace's clock, its rounds, and what its record says."""

    begin: float
    rounds: Sequence[NotedRound]
    bucket: int
    parameters: int
    numel: int
    compressor: dict[str, Any]
    collective: str
    reason: str
    ratio: float | None
    dense_wire_bytes: float
    ratio_reached: float
    gain: float | None
    sent_bytes: int
    wire_bytes: float
    predicted_s: float | None
    phases_s: dict[str, float]


class NotedStep(NamedTuple):
    """A step of a reducer, in seconds of the trace's clock.

    Attributes
    ----------
    reducer : int
        Number of the reducer in the trace.
    since : float or None
        When the thread came back to the script before; None where it is another thread.
    begin, end : float
        Of the step.
    buckets : sequence of NotedBucket
        In the order of exchange.
    step, lr, agreed, skipped, lost_ranks, choosing_s, once_wire_bytes, overhead_bytes, overhead_wire_bytes
        As in its record.
    """

    reducer: int
    since: float | None
    begin: float
    end: float
    buckets: Sequence[NotedBucket]
    step: int
    lr: float | None
    agreed: bool
    skipped: bool
    lost_ranks: list[int]
    choosing_s: float
    once_wire_bytes: float
    overhead_bytes: int
    overhead_wire_bytes: float


class About(NamedTuple):
    """What a rank's file begins with: its number, that of its host, how many ranks there are, and the clocks' error."""

    rank: int
    host: int
    ranks: int
    clock_error_s: float


def noted_bucket(done: "Exchanged", move: float, group: Group, whole: bool) -> tuple[Any, ...]:
    """Return what a `NotedBucket` is made of; ``move`` is added to times, for the others see `partners`."""
    own, rounds = done.record, []
    begun: dict[int, float] = {}  # of rounds in the background
    for asked, begin, end in done.spans:
        task = asked if isinstance(asked, Round) else asked.task
        if task.background and task is asked:
            begun[id(task)] = begin
            continue
        about = partners(task, group, whole)
        rounds.append((task.operation, about, begin + move, end + move, begun.pop(id(task), begin) + move))
    return (
        done.start + move, rounds, own.bucket, own.parameters, own.numel, own.compressor, own.collective, own.reason,
        own.ratio, own.dense_wire_bytes, own.ratio_reached, own.gain, own.sent_bytes, own.wire_bytes, own.predicted_s,
        own.phases_s,
    )  # fmt: skip


def packed(what: Any) -> bytes:
    """Return the bytes of what is to be added to a rank's file."""
    return pickle.dumps(what, 5)


def read(path: str) -> tuple[About, Iterator[NotedStep]]:
    """Read a rank's file; what was cut short when a disk was full, or a job died, is left out.

    Raises
    ------
    ConfigurationError
        Where it is no such file.
    """
    packs = _packs(path)
    try:
        about = About(*next(packs))
    except (StopIteration, TypeError):
        raise ConfigurationError(f"trace: '{path}' is not the file of a rank's trace; name F.rank-0, ...") from None
    return about, (_step(own) for pack in packs for own in pack)


def _packs(path: str) -> Iterator[Any]:
    with open(path, "rb") as file:
        while True:
            try:
                pack = _Plain(file).load()
            except (EOFError, pickle.UnpicklingError):
                return
            yield pack


class _Plain(pickle.Unpickler):
    """Reads numbers, strings and what holds them alone: a file among temporary ones may be anybody's."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"trace: no file of a rank holds a {module}.{name}")


def _step(own: Sequence[Any]) -> NotedStep:
    step = NotedStep(*own)
    buckets = [NotedBucket(*bucket) for bucket in step.buckets]
    return step._replace(buckets=[own._replace(rounds=[NotedRound(*one) for one in own.rounds]) for own in buckets])


def partners(task: Round, group: Group, whole: bool) -> dict[str, Any]:
    """Return what a round says of other ranks, by their numbers in the whole group.

    Parameters
    ----------
    task : Round
        The round.
    group : Group
        All ranks of the reducer.
    whole : bool
        Whether they are all that the trace is of; else others are not told apart.

    Returns
    -------
    dict
        ``group``, where it is not that of all ranks; ``from``: the ranks that this one cannot end without, left out
        where they are all; ``to``: the rank that a message goes to.
    """
    if whole and task.group == WORLD and task.operation in OF_ALL:
        return {}
    members = _members(group, task.group)
    about: dict[str, Any] = {} if task.group == WORLD else {"group": task.group}
    own = group.rank
    if not whole:
        return about | {"from": []}
    match task.operation:
        case operation if operation in OF_ALL:
            about["from"] = list(members)
        case "bcast" | "gatherv":
            root = members[task.root]
            receives = (own == root) == (task.operation == "gatherv")
            about["from"] = (list(members) if own == root else [root]) if receives else []
        case "sendrecv":
            to, source = task.peers
            about["from"] = [] if source is None else [members[source]]
            if to is not None:
                about["to"] = members[to]
        case "neighbor_alltoall" if task.graph is not None:
            about["from"] = [members[other] for other in task.graph.neighbours(members.index(own))]
    return about


def _members(group: Group, name: str) -> Sequence[int]:
    """Return the ranks of this rank's group of a name."""
    return range(group.size) if name == WORLD else _members_of_part(group, name)


@functools.lru_cache
def _members_of_part(group: Group, name: str) -> tuple[int, ...]:
    if group.layout:
        return layout_groups(group.layout, group.rank)[1][name]
    part = group.part(name)
    return tuple(range(group.size)) if part is not None and part.size == group.size else (group.rank,)
