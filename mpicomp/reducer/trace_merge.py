"""The traces of ranks as one file in the format of Chrome's tracing: a few steps at a time, so that no rank holds more.

A rank's file has a plain tuple for each step, some of which are pickled at a time: to make events in JSON of them takes
ten times as long, and is done in the end. The format of events, one a line, in microseconds:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import hashlib
import itertools
import json
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError
from mpicomp.rounds import Group, Round, Rounds, gather_rows

_BLOCK_STEPS = 4096  # steps that are merged at a time, over all ranks: some megabytes
_BYTE = np.dtype(np.uint8)
_NOBODY: Iterator[float] = itertools.repeat(-math.inf)  # is waited for

Key = tuple[Any, ...]


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


class RankInfo(NamedTuple):
    """What a rank's file begins with: its number, that of its host, how many ranks there are, and the clocks' error."""

    rank: int
    host: int
    ranks: int
    clock_error_s: float


TRACKS = ("step", "compute", "bucket", "compress", "wait", "exchange", "decode")
"""Threads of a rank, as a viewer shows them, from the top down; each reducer has its own."""

_encoded = json.JSONEncoder(separators=(",", ":")).encode


class Events:
    """Makes the events of a rank's steps, in their order.

    Parameters
    ----------
    about : About
        The rank.
    clock : float
        Factor of its times.
    """

    def __init__(self, about: RankInfo, clock: float = 1.0) -> None:
        self._rank, self._clock = about.rank, clock
        self._reducers: set[int] = set()
        self._wire = self._dense = 0.0
        name = f"rank {about.rank} (host {about.host})"
        self._lines = [self._named("process_name", 0, name=name)]
        self._lines.append(self._named("process_sort_index", 0, sort_index=about.rank))

    def take(self) -> str:
        """Return the lines of what was added since the last call, each with a comma behind it."""
        lines, self._lines = self._lines, []
        return "".join(lines)

    def add(self, step: NotedStep, last: Iterator[float]) -> None:
        """Add a step.

        Parameters
        ----------
        step : NotedStep
            The step.
        last : iterator of float
            Of its rounds, when the last of the ranks had begun it without which this one cannot end it; it divides the
            round into a wait and an exchange.
        """
        if step.reducer not in self._reducers:
            self._reducers.add(step.reducer)
            self._name_tracks(step.reducer)
        since = step.begin if step.since is None else step.since
        if step.since is not None:
            self._slice("compute", step.reducer, since, step.begin, "compute", {"step": step.step})
        for bucket in step.buckets:
            self._add_bucket(step, bucket, last)
        self._wire += step.overhead_wire_bytes
        if step.overhead_wire_bytes or not step.buckets:  # the last bucket reports its own
            self._count(step.end)
        about = {
            "step": step.step,
            "lr": step.lr if step.lr is None or math.isfinite(step.lr) else str(step.lr),
            "agreed": step.agreed,
            "skipped": step.skipped,
            "lost_ranks": step.lost_ranks,
            "choosing_s": step.choosing_s,
            "sent_bytes": step.overhead_bytes + sum(bucket.sent_bytes for bucket in step.buckets),
            "wire_bytes": step.overhead_wire_bytes + sum(bucket.wire_bytes for bucket in step.buckets),
            "once_wire_bytes": step.once_wire_bytes,
        }
        self._slice("step", step.reducer, since, step.end, f"step {step.step}", about)

    def _add_bucket(self, step: NotedStep, bucket: NotedBucket, last: Iterator[float]) -> None:
        ids, at = {"step": step.step, "bucket": bucket.bucket, "reducer": step.reducer}, bucket.begin
        for one in bucket.rounds:
            if one.begin > at:
                self._slice("compress", step.reducer, at, one.begin, "compress", ids)
            at = one.end
            cut = min(max(one.begin, next(last)), one.end)
            if cut > one.begin:
                self._slice("wait", step.reducer, one.begin, cut, "wait", ids)
            if cut < one.end or cut == one.begin:
                about = ids | one.about
                if one.begun != one.begin:
                    about["begun"] = self._time(one.begun)
                self._slice("exchange", step.reducer, cut, one.end, one.operation, about)
        end = at + bucket.phases_s["decode"]
        self._slice("decode", step.reducer, at, end, "decode", ids)
        self._wire += bucket.wire_bytes
        self._dense += bucket.dense_wire_bytes
        fields = bucket._asdict()
        del fields["begin"], fields["rounds"], fields["phases_s"]
        fields["measured_s"] = sum(bucket.phases_s.values())
        name = f"{bucket.compressor['id']} by {bucket.collective}"
        self._slice("bucket", step.reducer, bucket.begin, end, name, ids | fields)
        self._count(at)

    def _time(self, seconds: float) -> float:
        return round(1e6 * self._clock * seconds, 3)

    def _slice(self, track: str, reducer: int, begin: float, end: float, name: str, about: dict[str, Any]) -> None:
        event = {"ts": self._time(begin), "dur": round(max(0.0, 1e6 * (end - begin)), 3), "ph": "X", "cat": track}
        self._add(event | {"pid": self._rank, "tid": _number(track, reducer), "name": name, "args": about})

    def _count(self, at: float) -> None:
        """Add the bytes that have left the rank, and those of a dense ring."""
        event = {"ts": self._time(at), "ph": "C", "name": "bytes on the wire", "pid": self._rank, "tid": 0}
        self._add(event | {"args": {"sent": round(self._wire), "dense ring": round(self._dense)}})

    def _name_tracks(self, reducer: int) -> None:
        for track in TRACKS:
            number = _number(track, reducer)
            self._lines.append(self._named("thread_name", number, name=track + (f" {reducer + 1}" if reducer else "")))
            self._lines.append(self._named("thread_sort_index", number, sort_index=number))

    def _named(self, what: str, number: int, **about: Any) -> str:
        return _encoded({"name": what, "ph": "M", "pid": self._rank, "tid": number, "args": about}) + ",\n"

    def _add(self, event: dict[str, Any]) -> None:
        self._lines.append(_encoded(event) + ",\n")


def head(ranks: int, error: float) -> str:
    """Return what a file begins with: the number of ranks, and seconds by which their clocks may differ."""
    about = _encoded({"ranks": ranks, "clock_error_s": error})
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n'


TAIL = "\n]}\n"
"""What it ends with."""


def _number(track: str, reducer: int) -> int:
    return 10 * reducer + 1 + TRACKS.index(track)


def packed(what: Any) -> bytes:
    """Return the bytes of what is to be added to a rank's file."""
    return pickle.dumps(what, 5)


def read(path: str) -> tuple[RankInfo, Iterator[NotedStep]]:
    """Read a rank's file; what was cut short when a disk was full, or a job died, is left out.

    Raises
    ------
    ConfigurationError
        Where it is no such file.
    """
    packs = _packs(path)
    try:
        about = RankInfo(*next(packs))
    except (StopIteration, TypeError):
        raise ConfigurationError(f"trace: '{path}' is not the file of a rank's trace; name F.rank-0, ...") from None
    return about, (_step(step) for pack in packs for step in pack)


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


def _step(packed: Sequence[Any]) -> NotedStep:
    step = NotedStep(*packed)
    buckets = [NotedBucket(*bucket) for bucket in step.buckets]
    return step._replace(
        buckets=[bucket._replace(rounds=[NotedRound(*one) for one in bucket.rounds]) for bucket in buckets]
    )


def put_together(parts: Sequence[str], path: str) -> None:
    """Put the files that ranks have left into one trace: those of a job that has died. Waits are left out."""
    files = [read(part) for part in parts]
    files.sort(key=lambda about_and_steps: about_and_steps[0].rank)
    with open(path, "w", encoding="utf-8") as out:
        file = _File(out, files[0][0])
        for about, steps in files:
            for text in _texts(about, steps):
                file.add(text)
        file.end()


def merge(part: str, path: str, group: Group, drift: float, error: float, waits: bool = True) -> Rounds[None]:
    """Put the files of all ranks into one, which rank 0 writes. Collective, as rounds.

    The time in a round before the last rank that it receives from has begun it is a slice on another track: the rank
    waited.

    Parameters
    ----------
    part : str
        The file of this rank.
    path : str
        The one of all, on rank 0.
    group : Group
        All ranks.
    drift : float
        Share by which rank 0's clock goes faster than this one's.
    error : float
        Seconds by which clocks may differ.
    waits : bool
        Whether ranks have the numbers with which the files were written, so that waits can be computed.
    """
    about, steps = read(part)
    if group.rank:
        yield from _hand_over(about, steps, None, group, drift, waits)
        return
    with open(path, "w", encoding="utf-8") as out:
        file = _File(out, about._replace(ranks=group.size, clock_error_s=error))
        yield from _hand_over(about, steps, file, group, drift, waits)
        file.end()


class _File:
    """The file of all ranks."""

    def __init__(self, out: IO[str], about: RankInfo) -> None:
        self._out, self._between = out, ""
        out.write(head(about.ranks, about.clock_error_s))

    def add(self, lines: str) -> None:
        if lines:
            self._out.write(self._between + lines.removesuffix(",\n"))
            self._between = ",\n"

    def end(self) -> None:
        self._out.write(TAIL)


def _texts(about: RankInfo, steps: Iterator[NotedStep]) -> Iterator[str]:
    """Yield a rank's events, some steps at a time."""
    events = Events(about)
    for block in iter(lambda: list(itertools.islice(steps, _BLOCK_STEPS)), []):
        for step in block:
            events.add(step, _NOBODY)
        yield events.take()
    yield events.take()  # of a rank that has made no step


def _hand_over(
    about: RankInfo, steps: Iterator[NotedStep], file: _File | None, group: Group, drift: float, waits: bool
) -> Rounds[None]:
    """Give the events of all ranks to the file of the first. As rounds."""
    events = Events(about, 1 + drift)
    while True:
        block = list(itertools.islice(steps, max(1, _BLOCK_STEPS // group.size)))
        last = iter((yield from _last_begun(block, group, 1 + drift))) if waits else _NOBODY
        for step in block:
            events.add(step, last)
        everyones = yield from _everyones_bytes(events.take(), group)
        if everyones is None:
            return
        if file is not None:
            file.add(everyones)


def _last_begun(steps: Sequence[NotedStep], group: Group, clock: float) -> Rounds[list[float]]:
    """Return for each round when the last of the ranks had begun it that this one receives from. As rounds."""
    begun: dict[int, float] = {}
    received: list[list[tuple[int, int]]] = []  # of each round: ranks, and what they call their side of it
    counts: Counter[Key] = Counter()
    for step, bucket, one in _rounds(steps):
        about = one.about
        key = (step.reducer, step.step, bucket.bucket, one.operation, about.get("group"))
        if one.operation == "sendrecv":  # messages between two ranks come in the order in which they go
            ways = [(*key, source, group.rank) for source in about["from"] if source != group.rank]
            received.append([(way[-2], _digest(*way, _next(counts, way))) for way in ways])
            if "to" in about and about["to"] != group.rank:
                way = (*key, group.rank, about["to"])
                begun[_digest(*way, _next(counts, way))] = one.begun * clock
        else:
            name = _digest(*key, _next(counts, key))
            received.append([(source, name) for source in about.get("from", range(group.size))])
            begun[name] = one.begun * clock
    everyones = yield from _tables(begun, group)
    # What is compared is on the clock of all, and what is returned on that of this rank.
    return [
        max(
            (everyones[source].get(name, -math.inf) for source, name in sides if source < group.size), default=-math.inf
        )
        / clock
        for sides in received
    ]


def _rounds(steps: Sequence[NotedStep]) -> Iterator[tuple[NotedStep, NotedBucket, NotedRound]]:
    for step in steps:
        for bucket in step.buckets:
            for one in bucket.rounds:
                yield step, bucket, one


def _next(counts: Counter[Key], key: Key) -> int:
    """Return how many there have been, and count one more."""
    counts[key] += 1
    return counts[key]


def _digest(*words: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little", signed=True)


def _tables(table: dict[int, float], group: Group) -> Rounds[list[dict[int, float]]]:
    """Return the tables of all ranks. As rounds."""
    counts = yield from _everyones_numbers(len(table), group)
    send = np.array([*table, *np.array(list(table.values()), np.float64).view(np.int64)], np.int64)
    recv = np.empty(2 * sum(counts), np.int64)
    rows = yield Round("allgatherv", [2 * count for count in counts], send.dtype, send=send, recv=recv)
    tables, at = [], 0
    for count in counts:
        keys, times = rows[at : at + count], rows[at + count : at + 2 * count].view(np.float64)
        tables.append(dict(zip(keys.tolist(), times.tolist(), strict=True)))
        at += 2 * count
    return tables


def _everyones_bytes(text: str, group: Group) -> Rounds[str | None]:
    """Return what all ranks have, on rank 0, and None on all where no rank has any more. As rounds."""
    send = np.frombuffer(text.encode(), _BYTE)
    counts = yield from _everyones_numbers(send.size, group)
    if not any(counts):
        return None
    recv = np.empty(sum(counts), np.uint8) if group.rank == 0 else None
    got: NDArray[np.uint8] = yield Round("gatherv", counts, _BYTE, send=send, recv=recv)
    return got.tobytes().decode() if group.rank == 0 else ""


def _everyones_numbers(number: int, group: Group) -> Rounds[list[int]]:
    return [int(other) for other in (yield from gather_rows(np.int64(number), group))]
