"""Listeners to steps: a trace of all ranks on one clock, for Perfetto or Chrome's tracing, and ranges for profilers.

Each rank writes its events to a file of its own, so that a job that dies leaves it; in the end the first rank joins all
files. An event is a line, in microseconds, in the format of
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Without listeners a step makes no call
for them.
"""

import contextlib
import json
import math
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np

from mpicomp.errors import ConfigurationError, RankFailedError
from mpicomp.mpi import Transport
from mpicomp.mpi.clocks import compare_clocks
from mpicomp.mpi.connect import connect
from mpicomp.mpi.rounds import WORLD, Round, Rounds, gather_rows, observe
from mpicomp.mpi.transport import Value
from mpicomp.reducer.agreement import run_collectively
from mpicomp.reducer.record import BucketExchange, StepRecord

_FLUSH_S = 0.25  # seconds after which events are written: a job that dies loses no more
_BLOCK_BYTES = 1 << 20  # of each rank's file that are merged at a time
_BYTE = np.dtype(np.uint8)
_TRACKS = ("step", "compute", "bucket", "compress", "exchange", "decode")  # of each reducer, from the top down
# Fields of records that slices show.
_OF_A_STEP = (
    "step", "agreed", "skipped", "lost_ranks", "choosing_s", "sent_bytes", "wire_bytes", "once_wire_bytes"
)  # fmt: skip
_OF_A_BUCKET = (
    "parameters", "numel", "compressor", "collective", "reason", "ratio", "ratio_reached", "gain", "sent_bytes",
    "wire_bytes", "dense_wire_bytes", "predicted_s"
)  # fmt: skip

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Listener(Protocol):
    """An object that is called at the end of every step of a reducer in this process."""

    def on_step(
        self, record: StepRecord, exchanges: Sequence[BucketExchange], reducer: int, transport: Transport
    ) -> None:
        """Process a step that has just ended; ``reducer`` is the reducer's number in this process. Not collective."""


listeners: list[Listener] = []  # listeners of this process

Marker = Callable[[str], Callable[[], object] | None]
"""Begins a range of a name and returns the function that ends it; None without a profiler."""

markers: list[Marker] = []  # markers of this process

UNDER_NSIGHT = "NVTX_INJECTION64_PATH" in os.environ
"""Whether a tool that collects NVTX ranges has started this process."""


class Phases:
    """The current range of a profiler; it begins and ends in the same thread."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], object]] = []

    def show(self, phase: str | None) -> None:
        """End the current range, and begin one named ``mpicomp::phase``; None begins none."""
        while self._ends:
            self._ends.pop()()
        if phase is not None and markers:
            self._ends = [end for marker in markers if (end := marker(f"mpicomp::{phase}")) is not None]


def marked(exchange: Rounds[Value]) -> Rounds[Value]:
    """Forward the rounds of an exchange, and show its phases to the profiler. As rounds."""
    show = Phases().show
    show("compress")
    try:
        return (yield from observe(exchange, before=lambda _: show("exchange"), after=lambda _: show("decode")))
    finally:
        show(None)


class trace:  # noqa: N801, it reads as a verb: with mpicomp.trace(...)
    """Write the steps of the ranks' reducers to one file, on one clock, for Perfetto or Chrome's tracing.

    Making it and `finish` are collective over ``comm``, and so is the end of a ``with`` block without an error. After
    an error the end of the block waits for no rank.

    Parameters
    ----------
    path : str
        The file, which rank 0 writes in the end. Until then each rank writes to its own file four times a second:
        ``PATH.rank-N``, or a temporary file on a host without that folder. These are removed when ``path`` is complete,
        and stay if the job dies: ``cat PATH.rank-*`` joins them.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.

    Raises
    ------
    ConfigurationError
        On all ranks, if a file cannot be written on one, or a trace is being written already.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.mpi import LocalWorld
    >>> alone = LocalWorld(1).transports[0]
    >>> reducer = mpicomp.Reducer("topk", comm=alone, policy={"warmup": 0})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "trace.json"
    ...     with mpicomp.trace(path, comm=alone):
    ...         mean = reducer.reduce({"w": np.ones(4, np.float32)})
    ...     events = json.loads(path.read_text())["traceEvents"]
    >>> sorted({event["name"] for event in events if event["ph"] == "X"})[:3]
    ['allgatherv', 'compress', 'compute']
    """

    def __init__(self, path: str | os.PathLike[str], comm: Any = None) -> None:
        transport = connect(comm)
        self._owned = transport is not comm
        self._transport = transport
        self._generation = transport.generation
        self._path, self._part = os.fspath(path), ""
        self._rank = transport.group.rank  # the name of this one, also after another has died
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._tracks: dict[int, int] = {}  # first track of each reducer
        self._wire = self._dense = 0.0
        self._file: IO[bytes] | None = None
        try:
            run_collectively(self._open, transport, "trace")
            self._error = transport.run(compare_clocks(transport))
            base = np.array([transport.clock()])
            transport.perform(Round("bcast", (1,), base.dtype, send=base.copy(), recv=base))
        except BaseException:
            self._leave(remove=True)
            raise
        self._offset = transport.offset
        self._shift = transport.offset - float(base[0])  # from this rank's clock to that of the trace
        self._left = self._flushed = time.perf_counter()  # when this thread returned to the script; of the last flush
        host = transport.group.layout[self._rank] if transport.group.layout else 0
        self._write(
            [
                self._metadata("process_name", 0, name=f"rank {self._rank} (host {host})"),
                self._metadata("process_sort_index", 0, sort_index=self._rank),
            ]
        )

    def flush(self) -> None:
        """Write the steps so far to this rank's file. Not collective."""
        with self._lock:
            self._write([], flush=True)

    def finish(self) -> None:
        """End the trace and merge the ranks' files. Collective; a second call does nothing.

        If ranks have died and the others continue on this transport, the trace has the steps of the others; on another
        transport the ranks' files remain, with a warning.
        """
        if not self._part:
            return
        self._close()
        transport, drift, complete = self._transport, 0.0, False
        try:
            if self._generation == transport.generation:
                self._error = max(self._error, transport.run(compare_clocks(transport)))
                drift = (transport.offset - self._offset) / (time.perf_counter() + self._shift)
            transport.run(self._merge(1 + drift))
            complete = True
        except RankFailedError:
            warnings.warn(f"trace: a rank has died; each rank's events are in '{self._path}.rank-N'", stacklevel=2)
        finally:
            self._leave(remove=complete)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self._leave(remove=False)

    def on_step(
        self, record: StepRecord, exchanges: Sequence[BucketExchange], reducer: int, transport: Transport
    ) -> None:
        if self._file is None or (transport.group.size > 1 and not transport.concurrent):
            return  # the file is closed, or ranks of one process are no ranks of the job
        now = time.perf_counter()
        begin = since = now - record.seconds
        with self._lock:
            events = [] if reducer in self._tracks else self._name_tracks(reducer)
            track = self._tracks[reducer]
            if threading.get_ident() == self._thread:
                since, self._left = self._left, now
                events.append(self._slice(track, "compute", since, begin, "compute", f'{{"step":{record.step}}}'))
            for done in exchanges:
                events += self._bucket_events(track, done, record.step)
            self._wire += record.overhead_wire_bytes
            if record.overhead_wire_bytes or not exchanges:  # the last bucket reports its own
                events.append(self._counters(now))
            about = {name: getattr(record, name) for name in _OF_A_STEP}
            about["lr"] = record.lr if record.lr is None or math.isfinite(record.lr) else str(record.lr)
            events.append(self._slice(track, "step", since, now, f"step {record.step}", _encode(about)))
            self._write(events, flush=now - self._flushed > _FLUSH_S)

    def _bucket_events(self, track: int, done: BucketExchange, step: int) -> list[str]:
        record, events, at = done.record, [], done.start
        ids = f'"step":{step},"bucket":{record.bucket}'
        for entry in done.log:
            task, begin, end = entry.task, entry.begin, entry.end
            if task.background and entry.sends:
                continue  # its slice is the wait for its end
            if begin > at:
                events.append(self._slice(track, "compress", at, begin, "compress", f"{{{ids}}}"))
            at = end
            group = "" if task.group == WORLD else f',"group":"{task.group}"'
            events.append(self._slice(track, "exchange", begin, end, task.operation, f"{{{ids}{group}}}"))
        end = at + record.phases_s["decode"]
        events.append(self._slice(track, "decode", at, end, "decode", f"{{{ids}}}"))
        self._wire += record.wire_bytes
        self._dense += record.dense_wire_bytes
        about = {"step": step, "bucket": record.bucket} | {name: getattr(record, name) for name in _OF_A_BUCKET}
        about["measured_s"] = sum(record.phases_s.values())
        name = f"{record.compressor['id']} by {record.collective}"
        return [*events, self._slice(track, "bucket", done.start, end, name, _encode(about)), self._counters(at)]

    def _slice(self, track: int, kind: str, begin: float, end: float, name: str, about: str) -> str:
        """Return the line of a time span; ``about`` is JSON. JSONEncoder would take most of the time of a trace."""
        ts, dur = 1e6 * (begin + self._shift), max(0.0, 1e6 * (end - begin))
        tid = track + _TRACKS.index(kind)
        return (
            f'{{"ts":{ts:.3f},"dur":{dur:.3f},"ph":"X","cat":"{kind}","pid":{self._rank},"tid":{tid},"name":"{name}",'
            f'"args":{about}}},\n'
        )

    def _counters(self, at: float) -> str:
        return (
            f'{{"ts":{1e6 * (at + self._shift):.3f},"ph":"C","name":"bytes on the wire","pid":{self._rank},"tid":0,'
            f'"args":{{"sent":{self._wire:.0f},"dense ring":{self._dense:.0f}}}}},\n'
        )

    def _name_tracks(self, reducer: int) -> list[str]:
        number = len(self._tracks)
        self._tracks[reducer] = first = 1 + len(_TRACKS) * number
        suffix, events = f" {number + 1}" if number else "", []
        for track, name in enumerate(_TRACKS, first):
            events.append(self._metadata("thread_name", track, name=name + suffix))
            events.append(self._metadata("thread_sort_index", track, sort_index=track))
        return events

    def _metadata(self, kind: str, track: int, **about: Any) -> str:
        return _encode({"name": kind, "ph": "M", "pid": self._rank, "tid": track, "args": about}) + ",\n"

    def _open(self) -> None:
        for other in listeners:
            if isinstance(other, trace):
                raise ConfigurationError(f"trace: '{other._path}' is being written already; finish() it first")
        folder = os.path.dirname(self._path) or "."
        reached = os.access(folder, os.W_OK)
        if os.path.isdir(self._path) or (self._rank == 0 and not reached):
            raise ConfigurationError(f"trace: '{self._path}' cannot be written; make its folder, or name another file")
        name = f"{self._path}.rank-{self._rank}"
        part = name if reached else os.path.join(tempfile.gettempdir(), os.path.basename(name))
        try:
            self._file = open(part, "wb", buffering=_BLOCK_BYTES)  # noqa: SIM115, closed in _close
        except OSError as error:
            raise ConfigurationError(f"trace: '{part}' cannot be written: {error}") from error
        self._part = part
        listeners.append(self)
        if self._rank == 0:
            self._file.write(b"[\n")  # the format allows a list without its end

    def _write(self, events: list[str], flush: bool = False) -> None:
        """Write events; a full disk ends the trace of this rank, and not the training."""
        if self._file is None:
            return
        try:
            self._file.write("".join(events).encode())
            if flush:
                self._flushed = time.perf_counter()
                self._file.flush()
        except OSError as error:
            warnings.warn(f"trace: no more is written to '{self._part}': {error}", stacklevel=4)
            self._close()

    def _close(self) -> None:
        if self in listeners:
            listeners.remove(self)
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk
                file.close()

    def _leave(self, remove: bool) -> None:
        self._close()
        part, self._part = self._part, ""
        if remove and part:
            with contextlib.suppress(OSError):
                os.remove(part)
        if self._owned:
            self._transport.close()

    def _merge(self, clock: float) -> Rounds[None]:
        group = self._transport.group
        with contextlib.ExitStack() as stack:
            lines = _lines(stack.enter_context(open(self._part, "rb")), clock)
            out = stack.enter_context(open(self._path, "wb")) if group.rank == 0 else None
            if out is not None:
                about = _encode({"ranks": group.size, "clock_error_s": self._error})
                out.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n'.encode())
            while True:
                send = np.frombuffer(next(lines, b""), _BYTE)
                counts = [int(size) for size in (yield from gather_rows(np.int64(send.size), group))]
                if not any(counts):
                    break
                recv = None if out is None else np.empty(sum(counts), np.uint8)
                yield Round("gatherv", counts, _BYTE, send=send, recv=recv)
                if out is not None and recv is not None:
                    out.write(recv.tobytes())
            if out is not None:  # a last event without a comma, a repetition
                out.write(self._metadata("process_sort_index", 0, sort_index=self._rank)[:-2].encode() + b"\n]}\n")


def _lines(file: IO[bytes], clock: float) -> Iterator[bytes]:
    while lines := file.readlines(_BLOCK_BYTES):
        lines = [
            line for line in lines if line.endswith(b",\n")
        ]  # neither its head, nor a line that a full disk cut short
        if clock != 1:
            for place, line in enumerate(lines):
                if line.startswith(b'{"ts":'):
                    time_us, rest = line[6:].split(b",", 1)
                    lines[place] = b'{"ts":%.3f,%s' % (clock * float(time_us), rest)
        yield b"".join(lines)


def _add_nvtx() -> None:
    try:
        import nvtx
    except ImportError:
        return

    def mark(name: str) -> Callable[[], object]:
        nvtx.push_range(name)
        return lambda: nvtx.pop_range()

    markers.append(mark)


if UNDER_NSIGHT:
    _add_nvtx()
