"""Traces of all ranks, put into one file: a few steps at a time, so that no rank holds more of them."""

import hashlib
import json
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.reducer.trace_lines import EXCHANGE, STEP, moved, split
from mpicomp.rounds import Asked, Group, Round

_STEPS = 4096  # that are looked at together, over all ranks: some megabytes
_BYTE = np.dtype(np.uint8)

Key = tuple[Any, ...]


def merge(
    part: str, path: str, group: Group, drift: float, error: float, waits: bool = True
) -> Generator[Asked, Any, None]:
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
    first = group.rank == 0
    with open(part, encoding="utf-8") as lines, open(path if first else part, "w" if first else "r") as out:
        if first:
            about = json.dumps({"ranks": group.size, "clock_error_s": error})
            out.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n')
        next(lines, None)  # the bracket
        written = False
        for own in _blocks(lines, drift, max(1, _STEPS // group.size)):
            everyones = yield from _everyones_bytes((yield from _split(own, group)) if waits else "".join(own), group)
            if everyones is None:
                break
            if first and everyones:
                out.write(",\n" * written + everyones.removesuffix(",\n"))
                written = True
        if first:
            out.write("\n]}\n")


def _blocks(lines: Iterator[str], drift: float, steps: int) -> Iterator[list[str]]:
    """Cut lines behind every so many steps; empty blocks follow."""
    while True:
        block: list[str] = []
        left = steps
        for text in lines:
            if text.endswith("\n"):  # a line that was cut short when a disk was full is none
                block.append(moved(text, drift))
            left -= STEP in text
            if not left:
                break
        yield block


def _split(block: list[str], group: Group) -> Generator[Asked, Any, str]:
    """Return a block in which what ranks have waited is told apart. As rounds."""
    events = {place: json.loads(text.rstrip(",\n")) for place, text in enumerate(block) if EXCHANGE in text}
    begun: dict[int, float] = {}
    heard: dict[int, list[tuple[int, int]]] = {}  # by place: ranks, and what they call their side of it
    counts: Counter[Key] = Counter()
    for place, event in events.items():
        about = event["args"]
        step = (about["reducer"], about["step"], about["bucket"], event["name"], about.get("group"))
        if event["name"] == "sendrecv":  # messages between two ranks come in the order in which they go
            ways = [(*step, source, group.rank) for source in about["from"] if source != group.rank]
            heard[place] = [(way[-2], _digest(*way, _next(counts, way))) for way in ways]
            if "to" in about and about["to"] != group.rank:
                way = (*step, group.rank, about["to"])
                begun[_digest(*way, _next(counts, way))] = about.get("begun", event["ts"])
        else:
            key = _digest(*step, _next(counts, step))
            heard[place] = [(source, key) for source in about.get("from", range(group.size))]
            begun[key] = about.get("begun", event["ts"])
    everyones = yield from _tables(begun, group)
    parts: list[str] = []
    for place, text in enumerate(block):
        if place not in events:
            parts.append(text)
            continue
        when = [everyones[source].get(key, -np.inf) for source, key in heard[place] if source < group.size]
        parts.extend(split(events[place], max(when, default=-np.inf)))
    return "".join(parts)


def _next(counts: Counter[Key], key: Key) -> int:
    """Return how many there have been, and count one more."""
    counts[key] += 1
    return counts[key]


def _digest(*words: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little", signed=True)


def _tables(own: dict[int, float], group: Group) -> Generator[Asked, Any, list[dict[int, float]]]:
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


def _everyones_bytes(text: str, group: Group) -> Generator[Asked, Any, str | None]:
    """Return what all ranks have, on rank 0, and None on all where no rank has any more. As rounds."""
    send = np.frombuffer(text.encode(), _BYTE)
    counts = yield from _everyones_numbers(send.size, group)
    if not any(counts):
        return None
    recv = np.empty(sum(counts), np.uint8) if group.rank == 0 else None
    got: NDArray[np.uint8] = yield Round("gatherv", counts, _BYTE, send=send, recv=recv)
    return got.tobytes().decode() if group.rank == 0 else ""


def _everyones_numbers(own: int, group: Group) -> Generator[Asked, Any, list[int]]:
    send = np.array([own], np.int64)
    numbers = yield Round("allgatherv", [1] * group.size, send.dtype, send=send, recv=np.empty(group.size, np.int64))
    return [int(number) for number in numbers]
