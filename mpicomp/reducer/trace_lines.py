"""The lines of a trace: events in the format of Chrome's tracing, one a line, in microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each event that has a time begins with
it, so that it can be moved without reading the rest.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mpicomp.rounds import WORLD, Asked, Graph, Group, Round, layout_groups

TRACKS = ("step", "compute", "bucket", "compress", "wait", "exchange", "decode")
"""Threads of a rank, as a viewer shows them, from the top down; each reducer has its own."""

_NUMBERS = {track: 1 + place for place, track in enumerate(TRACKS)}

_OF_ALL = ("allreduce", "allgatherv", "alltoallv")  # every rank hears from every other

EXCHANGE = '"cat":"exchange"'
STEP = '"cat":"step"'
"""Parts of lines by which they are found."""


class Span(NamedTuple):
    """A round on a transport's clock: when the exchange waited for it, and when this rank had begun it."""

    operation: str
    group: str
    root: int
    peers: tuple[int | None, int | None]
    graph: Graph | None
    begin: float
    end: float
    begun: float


class Spans:
    """Collects the rounds of a bucket's exchange."""

    def __init__(self) -> None:
        self.done: list[Span] = []
        self._begun: dict[int, float] = {}  # of rounds in the background

    def add(self, asked: Asked, begin: float, end: float) -> None:
        """Note what was asked for, and from when to when."""
        if isinstance(asked, Round):
            task, begun = asked, begin
            if task.background:
                self._begun[id(task)] = begin
                return
        else:
            task = asked.task
            begun = self._begun.pop(id(task), begin)
        self.done.append(Span(task.operation, task.group, task.root, task.peers, task.graph, begin, end, begun))


encoded = json.JSONEncoder(separators=(",", ":")).encode


@functools.lru_cache
def quoted(name: str) -> str:
    """Return a name that comes often in JSON."""
    return json.dumps(name)


def number(value: float | None) -> str:
    """Return a number in JSON, in a third of the time that an encoder takes; None where there is none."""
    if value is None:
        return "null"
    return encoded(value) if value - value else f"{value}"  # it is not 0 where the value is not finite


def line(begin: float, end: float, track: str, reducer: int, rank: int, name: str, about: str) -> str:
    """Return a slice of a rank's track, from and to a time in seconds; ``name`` and ``about`` are JSON."""
    seconds = end - begin if end > begin else 0.0
    return (
        f'{{"ts":{1e6 * begin:.3f},"dur":{1e6 * seconds:.3f},{_kind(track, reducer, rank)},'
        f'"name":{name},"args":{about}}},\n'
    )


@functools.lru_cache
def _kind(track: str, reducer: int, rank: int) -> str:
    return f'"ph":"X","cat":"{track}","pid":{rank},"tid":{tid(track, reducer)}'


def counter(at: float, rank: int, wire: float, dense: float) -> str:
    """Return the bytes that have left a rank by a time in seconds, and those of a dense ring."""
    return (
        f'{{"ts":{1e6 * at:.3f},"ph":"C","name":"bytes on the wire","pid":{rank},"tid":0,'
        f'"args":{{"sent":{wire:.0f},"dense ring":{dense:.0f}}}}},\n'
    )


def tid(track: str, reducer: int) -> int:
    """Return the number of a track."""
    return 10 * reducer + _NUMBERS[track]


def names_of_rank(rank: int, host: int) -> str:
    """Return what names a rank."""
    return _named("process_name", rank, 0, name=f"rank {rank} (host {host})") + _named(
        "process_sort_index", rank, 0, sort_index=rank
    )


def names_of_tracks(rank: int, reducer: int) -> str:
    """Return what names the tracks of a rank's reducer, counted from 0."""
    lines = ""
    for track in TRACKS:
        number = tid(track, reducer)
        lines += _named("thread_name", rank, number, name=track + (f" {reducer + 1}" if reducer else ""))
        lines += _named("thread_sort_index", rank, number, sort_index=number)
    return lines


def partners(span: Span, group: Group, whole: bool) -> dict[str, Any]:
    """Return what a round says of other ranks, by their numbers in the whole group.

    Parameters
    ----------
    span : Span
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
    if whole and span.group == WORLD and span.operation in _OF_ALL:
        return {}
    members = _members(group, span.group)
    about: dict[str, Any] = {} if span.group == WORLD else {"group": span.group}
    own = group.rank
    if not whole:
        return about | {"from": []}
    match span.operation:
        case operation if operation in _OF_ALL:
            about["from"] = list(members)
        case "bcast" | "gatherv":
            root = members[span.root]
            receives = (own == root) == (span.operation == "gatherv")
            about["from"] = (list(members) if own == root else [root]) if receives else []
        case "sendrecv":
            to, source = span.peers
            about["from"] = [] if source is None else [members[source]]
            if to is not None:
                about["to"] = members[to]
        case "neighbor_alltoall" if span.graph is not None:
            about["from"] = [members[other] for other in span.graph.neighbours(members.index(own))]
    return about


def moved(text: str, drift: float) -> str:
    """Return a line on a clock that goes faster by this share."""
    if not drift or not text.startswith('{"ts":'):
        return text
    stop = text.index(",", 6)
    return f'{{"ts":{float(text[6:stop]) * (1 + drift):.3f}{text[stop:]}'


def split(event: dict[str, Any], last: float) -> Iterable[str]:
    """Cut a round in the wait for the ranks that it cannot end without, and what comes then.

    Parameters
    ----------
    event : dict
        The event of the round.
    last : float
        Microsecond in which the last of these ranks had begun it.
    """
    begin, end = event["ts"], event["ts"] + event["dur"]
    cut = min(max(begin, last), end)
    rank, reducer, about = event["pid"], event["args"]["reducer"], event["args"]
    if cut > begin:
        short = {key: about[key] for key in ("step", "bucket", "reducer")}
        yield line(begin / 1e6, cut / 1e6, "wait", reducer, rank, '"wait"', encoded(short))
    if cut < end or cut == begin:
        yield line(cut / 1e6, end / 1e6, "exchange", reducer, rank, quoted(event["name"]), encoded(about))


def _named(what: str, rank: int, number: int, **about: Any) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": rank, "tid": number, "args": about}) + ",\n"


def _members(group: Group, name: str) -> Sequence[int]:
    """Return the ranks of this rank's group of a name."""
    return range(group.size) if name == WORLD else _members_of_part(group, name)


@functools.lru_cache
def _members_of_part(group: Group, name: str) -> tuple[int, ...]:
    if group.layout:
        return layout_groups(group.layout, group.rank)[1][name]
    part = group.part(name)
    return tuple(range(group.size)) if part is not None and part.size == group.size else (group.rank,)
