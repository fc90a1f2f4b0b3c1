"""Traces of all ranks, put into one file: a few steps at a time, so that no rank holds more of them."""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.reducer.trace_events import TAIL, Events, head
from mpicomp.reducer.trace_notes import About, NotedBucket, NotedRound, NotedStep, read
from mpicomp.rounds import Group, Round, Rounds, gather_rows

_STEPS = 4096  # that are looked at together, over all ranks: some megabytes
_BYTE = np.dtype(np.uint8)
_NOBODY: Iterator[float] = itertools.repeat(-math.inf)  # is waited for

Key = tuple[Any, ...]


def put_together(parts: Sequence[str], path: str) -> None:
    """Put the files that ranks have left into one trace: those of a job that has died. What was waited is not told."""
    own = [read(part) for part in parts]
    own.sort(key=lambda about_and_steps: about_and_steps[0].rank)
    with open(path, "w", encoding="utf-8") as out:
        file = _File(out, own[0][0])
        for about, steps in own:
            for text in _texts(about, steps):
                file.add(text)
        file.end()


def merge(part: str, path: str, group: Group, drift: float, error: float, waits: bool = True) -> Rounds[None]:
    """Put the files of all ranks into one, which rank 0 writes. Collective, as rounds.

    What a rank was in a round before the last of those had begun it that it hears from becomes a slice of its own on
    another track: it waited.

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
        Whether ranks have the numbers with which the files were written, so that what they waited can be told.
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

    def __init__(self, out: IO[str], about: About) -> None:
        self._out, self._between = out, ""
        out.write(head(about.ranks, about.clock_error_s))

    def add(self, lines: str) -> None:
        if lines:
            self._out.write(self._between + lines.removesuffix(",\n"))
            self._between = ",\n"

    def end(self) -> None:
        self._out.write(TAIL)


def _texts(about: About, steps: Iterator[NotedStep]) -> Iterator[str]:
    """Yield a rank's events, some steps at a time."""
    events = Events(about)
    for block in iter(lambda: list(itertools.islice(steps, _STEPS)), []):
        for step in block:
            events.add(step, _NOBODY)
        yield events.take()
    yield events.take()  # of a rank that has made no step


def _hand_over(
    about: About, steps: Iterator[NotedStep], file: _File | None, group: Group, drift: float, waits: bool
) -> Rounds[None]:
    """Give the events of all ranks to the file of the first. As rounds."""
    events = Events(about, 1 + drift)
    while True:
        block = list(itertools.islice(steps, max(1, _STEPS // group.size)))
        last = iter((yield from _last_begun(block, group, 1 + drift))) if waits else _NOBODY
        for step in block:
            events.add(step, last)
        everyones = yield from _everyones_bytes(events.take(), group)
        if everyones is None:
            return
        if file is not None:
            file.add(everyones)


def _last_begun(steps: Sequence[NotedStep], group: Group, clock: float) -> Rounds[list[float]]:
    """Return for each round when the last of the ranks had begun it that this one hears from. As rounds."""
    begun: dict[int, float] = {}
    heard: list[list[tuple[int, int]]] = []  # of each round: ranks, and what they call their side of it
    counts: Counter[Key] = Counter()
    for step, bucket, one in _rounds(steps):
        about = one.about
        key = (step.reducer, step.step, bucket.bucket, one.operation, about.get("group"))
        if one.operation == "sendrecv":  # messages between two ranks come in the order in which they go
            ways = [(*key, source, group.rank) for source in about["from"] if source != group.rank]
            heard.append([(way[-2], _digest(*way, _next(counts, way))) for way in ways])
            if "to" in about and about["to"] != group.rank:
                way = (*key, group.rank, about["to"])
                begun[_digest(*way, _next(counts, way))] = one.begun * clock
        else:
            name = _digest(*key, _next(counts, key))
            heard.append([(source, name) for source in about.get("from", range(group.size))])
            begun[name] = one.begun * clock
    everyones = yield from _tables(begun, group)
    # What is compared is on the clock of all, and what is returned on that of this rank.
    return [
        max((everyones[source].get(name, -math.inf) for source, name in own if source < group.size), default=-math.inf)
        / clock
        for own in heard
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


def _tables(own: dict[int, float], group: Group) -> Rounds[list[dict[int, float]]]:
    """Return the tables of all ranks. As rounds."""
    counts = yield from _everyones_numbers(len(own), group)
    send = np.array([*own, *np.array(list(own.values()), np.float64).view(np.int64)], np.int64)
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


def _everyones_numbers(own: int, group: Group) -> Rounds[list[int]]:
    return [int(number) for number in (yield from gather_rows(np.int64(own), group))]
