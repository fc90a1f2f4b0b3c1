"""Merge the ranks' traces into one file in the format of Chrome's tracing, a few steps at a time to save memory.

A rank's file has a plain tuple for each step, pickled in groups: JSON takes ten times as long, and is written in the
end. The format of events, one a line, in microseconds:
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
_NO_WAITS: Iterator[float] = itertools.repeat(-math.inf)

Key = tuple[Any, ...]


class NotedRound(NamedTuple):
    """A round, in seconds of the trace's clock."""

    operation: str
    about: dict[str, Any]  # see `mpicomp.reducer.trace.partners`
    begin: float  # of the time in which the exchange waited for it
    end: float
    begun: float  # before ``begin`` for a round in the background


class NotedBucket(NamedTuple):
    """A bucket's exchange: its beginning on the trace's clock, its rounds, and fields of its record."""

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
    """A step of a reducer, in seconds of the trace's clock; from ``step`` on fields of its record."""

    reducer: int  # number of the reducer in the trace
    since: float | None  # end of the call before in the same thread; None for other threads
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
    """Head of a rank's file: the numbers of the rank and its host, the number of ranks, and the clocks' error."""

    rank: int
    host: int
    ranks: int
    clock_error_s: float


TRACKS = ("step", "compute", "bucket", "compress", "wait", "exchange", "decode")
"""Threads of a rank in a viewer, from the top down, for each reducer."""

_encoded = json.JSONEncoder(separators=(",", ":")).encode


class Events:
    """Makes the events of a rank's steps, in their order; ``clock`` is the factor of its times."""

    def __init__(self, about: RankInfo, clock: float = 1.0) -> None:
        self._rank, self._clock = about.rank, clock
        self._reducers: set[int] = set()
        self._wire = self._dense = 0.0
        name = f"rank {about.rank} (host {about.host})"
        self._lines = [self._metadata("process_name", 0, name=name)]
        self._lines.append(self._metadata("process_sort_index", 0, sort_index=about.rank))

    def take(self) -> str:
        """Return the lines that were added since the last call, each with a comma at its end."""
        lines, self._lines = self._lines, []
        return "".join(lines)

    def add(self, step: NotedStep, last: Iterator[float]) -> None:
        """Add a step; ``last`` yields for each round the time until which it was a wait for another rank."""
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
        for noted in bucket.rounds:
            if noted.begin > at:
                self._slice("compress", step.reducer, at, noted.begin, "compress", ids)
            at = noted.end
            cut = min(max(noted.begin, next(last)), noted.end)
            if cut > noted.begin:
                self._slice("wait", step.reducer, noted.begin, cut, "wait", ids)
            if cut < noted.end or cut == noted.begin:
                about = ids | noted.about
                if noted.begun != noted.begin:
                    about["begun"] = self._time(noted.begun)
                self._slice("exchange", step.reducer, cut, noted.end, noted.operation, about)
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
            self._lines.append(
                self._metadata("thread_name", number, name=track + (f" {reducer + 1}" if reducer else ""))
            )
            self._lines.append(self._metadata("thread_sort_index", number, sort_index=number))

    def _metadata(self, kind: str, number: int, **about: Any) -> str:
        return _encoded({"name": kind, "ph": "M", "pid": self._rank, "tid": number, "args": about}) + ",\n"

    def _add(self, event: dict[str, Any]) -> None:
        self._lines.append(_encoded(event) + ",\n")


def head(ranks: int, error: float) -> str:
    """Return the head of a file: the number of ranks, and seconds by which their clocks may differ."""
    about = _encoded({"ranks": ranks, "clock_error_s": error})
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n'


TAIL = "\n]}\n"


def _number(track: str, reducer: int) -> int:
    return 10 * reducer + 1 + TRACKS.index(track)


def packed(content: Any) -> bytes:
    """Return the bytes that add steps or a `RankInfo` to a rank's file."""
    return pickle.dumps(content, 5)


def read(path: str) -> tuple[RankInfo, Iterator[NotedStep]]:
    """Read a rank's file, without a last group that was cut short by a full disk or the end of the job."""
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
    """Reads only numbers, strings and their containers: a file among temporary ones may be anybody's."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"trace: no file of a rank holds a {module}.{name}")


def _step(packed: Sequence[Any]) -> NotedStep:
    step = NotedStep(*packed)
    buckets = [NotedBucket(*bucket) for bucket in step.buckets]
    return step._replace(
        buckets=[bucket._replace(rounds=[NotedRound(*noted) for noted in bucket.rounds]) for bucket in buckets]
    )


def merge_files(parts: Sequence[str], path: str) -> None:
    """Merge the files of a job that has died into one trace, without waits."""
    files = [read(part) for part in parts]
    files.sort(key=lambda about_and_steps: about_and_steps[0].rank)
    with open(path, "w", encoding="utf-8") as out:
        file = _File(out, files[0][0])
        for about, steps in files:
            for text in _texts(about, steps):
                file.add(text)
        file.end()


def merge(part: str, path: str, group: Group, drift: float, error: float, waits: bool = True) -> Rounds[None]:
    """Merge the files of all ranks, ``part`` of each, into ``path``, which rank 0 writes. Collective, as rounds.

    Rank 0's clock is faster than this one's by the share ``drift``, and clocks may differ by ``error`` seconds. If
    ranks have the numbers of the files, ``waits`` are shown on a track of their own: the time in a round before the
    last rank that this one receives from has begun it.
    """
    about, steps = read(part)
    if group.rank:
        yield from _write_all(about, steps, None, group, drift, waits)
        return
    with open(path, "w", encoding="utf-8") as out:
        file = _File(out, about._replace(ranks=group.size, clock_error_s=error))
        yield from _write_all(about, steps, file, group, drift, waits)
        file.end()


class _File:
    """The merged file."""

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
            events.add(step, _NO_WAITS)
        yield events.take()
    yield events.take()  # of a rank that has made no step


def _write_all(
    about: RankInfo, steps: Iterator[NotedStep], file: _File | None, group: Group, drift: float, waits: bool
) -> Rounds[None]:
    """Write the events of all ranks to the file of the first. As rounds."""
    events = Events(about, 1 + drift)
    while True:
        block = list(itertools.islice(steps, max(1, _BLOCK_STEPS // group.size)))
        last = iter((yield from _last_begun(block, group, 1 + drift))) if waits else _NO_WAITS
        for step in block:
            events.add(step, last)
        text = yield from _gather_text(events.take(), group)
        if text is None:
            return
        if file is not None:
            file.add(text)


def _last_begun(steps: Sequence[NotedStep], group: Group, clock: float) -> Rounds[list[float]]:
    """Return for each round the time at which the last rank that this one receives from had begun it. As rounds."""
    begun: dict[int, float] = {}
    received: list[list[tuple[int, int]]] = []  # by round: ranks, and the digests of their side of it
    counts: Counter[Key] = Counter()
    for step, bucket, noted in _rounds(steps):
        about = noted.about
        key = (step.reducer, step.step, bucket.bucket, noted.operation, about.get("group"))
        if noted.operation == "sendrecv":  # messages between two ranks arrive in the order in which they are sent
            ways = [(*key, source, group.rank) for source in about["from"] if source != group.rank]
            received.append([(way[-2], _digest(*way, _next(counts, way))) for way in ways])
            if "to" in about and about["to"] != group.rank:
                way = (*key, group.rank, about["to"])
                begun[_digest(*way, _next(counts, way))] = noted.begun * clock
        else:
            name = _digest(*key, _next(counts, key))
            received.append([(source, name) for source in about.get("from", range(group.size))])
            begun[name] = noted.begun * clock
    tables = yield from _tables(begun, group)
    # Times are compared on the shared clock, and returned on this rank's.
    return [
        max((tables[source].get(name, -math.inf) for source, name in sides if source < group.size), default=-math.inf)
        / clock
        for sides in received
    ]


def _rounds(steps: Sequence[NotedStep]) -> Iterator[tuple[NotedStep, NotedBucket, NotedRound]]:
    for step in steps:
        for bucket in step.buckets:
            for noted in bucket.rounds:
                yield step, bucket, noted


def _next(counts: Counter[Key], key: Key) -> int:
    """Count one more of a key and return its count."""
    counts[key] += 1
    return counts[key]


def _digest(*words: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little", signed=True)


def _tables(table: dict[int, float], group: Group) -> Rounds[list[dict[int, float]]]:
    """Return the tables of all ranks. As rounds."""
    counts = yield from _gather_numbers(len(table), group)
    send = np.array([*table, *np.array(list(table.values()), np.float64).view(np.int64)], np.int64)
    recv = np.empty(2 * sum(counts), np.int64)
    rows = yield Round("allgatherv", [2 * count for count in counts], send.dtype, send=send, recv=recv)
    tables, at = [], 0
    for count in counts:
        keys, times = rows[at : at + count], rows[at + count : at + 2 * count].view(np.float64)
        tables.append(dict(zip(keys.tolist(), times.tolist(), strict=True)))
        at += 2 * count
    return tables


def _gather_text(text: str, group: Group) -> Rounds[str | None]:
    """Return the texts of all ranks, on rank 0, or None on all if all are empty. As rounds."""
    send = np.frombuffer(text.encode(), _BYTE)
    counts = yield from _gather_numbers(send.size, group)
    if not any(counts):
        return None
    recv = np.empty(sum(counts), np.uint8) if group.rank == 0 else None
    got: NDArray[np.uint8] = yield Round("gatherv", counts, _BYTE, send=send, recv=recv)
    return got.tobytes().decode() if group.rank == 0 else ""


def _gather_numbers(number: int, group: Group) -> Rounds[list[int]]:
    return [int(other) for other in (yield from gather_rows(np.int64(number), group))]
