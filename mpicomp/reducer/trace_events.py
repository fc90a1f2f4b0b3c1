"""Events of a trace in the format of Chrome's tracing, one a line, in microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from mpicomp.reducer.trace_notes import About, NotedBucket, NotedStep

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

    def __init__(self, about: About, clock: float = 1.0) -> None:
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
        if step.overhead_wire_bytes or not step.buckets:  # the last bucket has told of its own
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
        own, at = {"step": step.step, "bucket": bucket.bucket, "reducer": step.reducer}, bucket.begin
        for one in bucket.rounds:
            if one.begin > at:
                self._slice("compress", step.reducer, at, one.begin, "compress", own)
            at = one.end
            cut = min(max(one.begin, next(last)), one.end)
            if cut > one.begin:
                self._slice("wait", step.reducer, one.begin, cut, "wait", own)
            if cut < one.end or cut == one.begin:
                about = own | one.about
                if one.begun != one.begin:
                    about["begun"] = self._time(one.begun)
                self._slice("exchange", step.reducer, cut, one.end, one.operation, about)
        end = at + bucket.phases_s["decode"]
        self._slice("decode", step.reducer, at, end, "decode", own)
        self._wire += bucket.wire_bytes
        self._dense += bucket.dense_wire_bytes
        told = bucket._asdict()
        del told["begin"], told["rounds"], told["phases_s"]
        told["measured_s"] = sum(bucket.phases_s.values())
        name = f"{bucket.compressor['id']} by {bucket.collective}"
        self._slice("bucket", step.reducer, bucket.begin, end, name, own | told)
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
