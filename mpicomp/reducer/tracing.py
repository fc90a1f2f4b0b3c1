"""A trace of all ranks on one clock, in the format of Chrome's tracing, which Perfetto reads.

Each rank writes what it did to a file of its own, step by step, so that a job that dies leaves it. In the end the first
rank puts all of them into one.
"""

import contextlib
import math
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from mpicomp.errors import ConfigurationError, RankFailedError
from mpicomp.reducer.agreement import together
from mpicomp.reducer.record import BucketRecord, StepRecord
from mpicomp.reducer.trace_lines import (
    Span,
    counter,
    encoded,
    line,
    names_of_rank,
    names_of_tracks,
    number,
    partners,
    quoted,
)
from mpicomp.reducer.trace_merge import merge
from mpicomp.rounds import Group, Round
from mpicomp.transport.clocks import compare_clocks
from mpicomp.transport.connect import connect

if TYPE_CHECKING:
    from mpicomp.reducer.core import Core
    from mpicomp.reducer.exchange import Exchanged

_FLUSH_S = 0.25  # seconds after which steps are written: a job that dies loses no more
_MOST = 256  # steps that are kept until then
_TRUTH = "false", "true"  # in JSON

Track = tuple[int, int]
"""Number of a reducer, from 0, and a rank."""

active: "trace | None" = None
"""The trace that is being written in this process."""


class _Step(NamedTuple):
    """A step as it was when it ended; times on this rank's clock, but for those of buckets.

    Attributes
    ----------
    record : StepRecord
        Its record.
    reducer : int
        Number of the reducer.
    group : Group
        Its ranks.
    whole : bool
        Whether they are all that the trace is of.
    since : float or None
        When the thread came back to the script before; None where it is another thread.
    begin, end : float
        Of the step.
    buckets : sequence of (BucketRecord, float, float, list of Span)
        Of each, its beginning on the trace's clock, what must be added to times of the rounds for it, and the rounds.
    """

    record: StepRecord
    reducer: int
    group: Group
    whole: bool
    since: float | None
    begin: float
    end: float
    buckets: Sequence[tuple[BucketRecord, float, float, Sequence[Span]]]


class trace:  # noqa: N801, it reads as what it does: with mpicomp.trace(...)
    """Write what the ranks' reducers do from now on to one file, on one clock, for Perfetto or Chrome's tracing.

    Making it and `finish` are collective over ``comm``, and so is the end of a ``with`` block that no error leaves. One
    that an error leaves waits for nobody.

    Parameters
    ----------
    path : str
        The file, which rank 0 writes in the end. Until then each rank adds to one of its own, four times a second:
        beside it, under the name ``PATH.rank-N``, or among temporary files where a host has no such folder. They are
        removed when ``path`` is complete, and stay where the job dies: each is a trace by itself.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.

    Raises
    ------
    ConfigurationError
        On all ranks, where a file cannot be written on one, or a trace is being written already.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.transport import LocalWorld
    >>> alone = LocalWorld(1).transports[0]
    >>> reducer = mpicomp.Reducer("topk", warmup=0, comm=alone)
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
        self._path = os.fspath(path)
        self._part = ""
        self._rank = transport.group.rank  # the name of this one, whoever dies later
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._tracks: dict[int, int] = {}  # by number of the reducer
        self._wire = self._dense = 0.0
        self._file: IO[str] | None = None
        self._flushed = -math.inf
        self._finished = False
        # What is known of a step when it ends is kept as it is: to write many at a time takes a third less than each.
        self._steps: list[_Step] = []
        self._plans: dict[tuple[int, int], tuple[list[Any], str]] = {}  # by reducer and bucket: what they hold, in JSON
        try:
            together(self._open, transport, "trace")
            self._error = transport.run(compare_clocks(transport))
            base = np.array([transport.clock()])
            transport.perform(Round("bcast", (1,), base.dtype, send=base.copy(), recv=base))
        except BaseException:
            self._stop()
            self._leave(remove=True)
            raise
        self._offset = transport.offset
        self._shift = transport.offset - float(base[0])  # from this rank's clock to that of the trace
        self._left = time.perf_counter()  # when this thread came back to the script
        layout = transport.group.layout
        self._write("[\n" + names_of_rank(self._rank, layout[self._rank] if layout else 0))

    def flush(self) -> None:
        """Write the steps that have ended to this rank's file now. Not collective."""
        with self._lock:
            self._drain()

    def finish(self) -> None:
        """End the trace and put the ranks' files into one. Collective; a second call does nothing.

        Where ranks have died and the others have gone on, with this transport, it has what those did; with another one
        the ranks' files stay as they are, with a warning.
        """
        if self._finished:
            return
        self._finished = True
        self._stop()
        transport, complete = self._transport, False
        try:
            drift, alive = 0.0, self._generation == transport.generation
            if alive:
                self._error = max(self._error, transport.run(compare_clocks(transport)))
                drift = (transport.offset - self._offset) / (time.perf_counter() + self._shift)
            transport.run(merge(self._part, self._path, transport.group, drift, self._error, alive))
            complete = True
        except RankFailedError:
            warnings.warn(f"trace: a rank has died; what each rank did is in '{self._path}.rank-N'", stacklevel=2)
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
            self._finished = True
            self._stop()
            self._leave(remove=False)

    def step(self, record: StepRecord, done: "Sequence[Exchanged]", core: "Core", seconds: float) -> None:
        """Write a step of a reducer, which has just ended and took so many seconds. Not collective."""
        transport = core.transport
        if self._file is None or (transport.group.size > 1 and not transport.concurrent):
            return  # or ranks that live in one process, which are no ranks of the job
        now = time.perf_counter()
        since = None
        if threading.get_ident() == self._thread:
            since, self._left = self._left, now
        group = core.transport.group
        whole = group.size == self._transport.group.size
        move = self._shift - core.transport.offset
        buckets = [(own.record, own.start + move, move, own.spans) for own in done]
        with self._lock:
            self._steps.append(_Step(record, core.number, group, whole, since, now - seconds, now, buckets))
            if now - self._flushed > _FLUSH_S or len(self._steps) >= _MOST:
                self._drain()

    def _drain(self) -> None:
        """Write the steps that have ended."""
        steps, self._steps = self._steps, []
        if steps:
            self._write("".join([self._lines(step) for step in steps]))
        self._flushed = time.perf_counter()

    def _lines(self, step: "_Step") -> str:
        """Return the lines of a step."""
        lines, record, shift = [], step.record, self._shift
        if step.reducer not in self._tracks:
            self._tracks[step.reducer] = len(self._tracks)
            lines.append(names_of_tracks(self._rank, self._tracks[step.reducer]))
        track = self._tracks[step.reducer], self._rank
        since = step.begin if step.since is None else step.since
        if step.since is not None:
            about = f'{{"step":{record.step}}}'
            lines.append(line(since + shift, step.begin + shift, "compute", *track, '"compute"', about))
        for bucket in step.buckets:
            self._add_bucket(lines, step, *bucket, track)
        self._wire += record.overhead_wire_bytes
        about = (
            f'{{"step":{record.step},"lr":{number(record.lr)},"agreed":{_TRUTH[record.agreed]},'
            f'"skipped":{_TRUTH[record.skipped]},"lost_ranks":{record.lost_ranks and encoded(record.lost_ranks)},'
            f'"choosing_s":{record.choosing_s},"sent_bytes":{record.sent_bytes},"wire_bytes":{record.wire_bytes},'
            f'"once_wire_bytes":{record.once_wire_bytes}}}'
        )
        if record.overhead_wire_bytes or not step.buckets:  # the last bucket has told of its own
            lines.append(counter(step.end + shift, self._rank, self._wire, self._dense))
        lines.append(line(since + shift, step.end + shift, "step", *track, f'"step {record.step}"', about))
        return "".join(lines)

    def _add_bucket(
        self,
        lines: list[str],
        step: "_Step",
        record: BucketRecord,
        begin: float,
        move: float,
        spans: Sequence[Span],
        track: Track,
    ) -> None:
        """Add the lines of a bucket."""
        step_and_bucket = f'"step":{step.record.step},"bucket":{record.bucket},"reducer":{track[0]}'
        short, at = f"{{{step_and_bucket}}}", begin
        phases = []
        for span in spans:
            if span.begin + move > at:
                phases.append(line(at, span.begin + move, "compress", *track, '"compress"', short))
            at = span.end + move
            about = partners(span, step.group, step.whole)
            if span.begun != span.begin:
                about["begun"] = round(1e6 * (span.begun + move), 3)
            told = f"{{{step_and_bucket},{encoded(about)[1:]}" if about else short
            phases.append(line(span.begin + move, at, "exchange", *track, f'"{span.operation}"', told))
        end = at + record.phases_s["decode"]
        phases.append(line(at, end, "decode", *track, '"decode"', short))
        self._wire += record.wire_bytes
        self._dense += record.dense_wire_bytes
        name = quoted(f"{record.compressor['id']} by {record.collective}")
        lines.append(line(begin, end, "bucket", *track, name, f"{{{step_and_bucket},{self._about(record, track[0])}}}"))
        lines += phases
        lines.append(counter(at, self._rank, self._wire, self._dense))

    def _about(self, record: BucketRecord, reducer: int) -> str:
        """Return what a bucket's slice says of its plan. What stays from step to step is put in JSON once."""
        kept = [
            record.parameters, record.numel, record.compressor, record.collective, record.reason, record.ratio,
            record.dense_wire_bytes,
        ]  # fmt: skip
        before, text = self._plans.get((reducer, record.bucket), ([], ""))
        if before != kept:
            names = ("parameters", "numel", "compressor", "collective", "reason", "ratio", "dense_wire_bytes")
            text = encoded(dict(zip(names, kept, strict=True)))[1:-1]
            self._plans[reducer, record.bucket] = kept, text
        return (
            f'{text},"ratio_reached":{record.ratio_reached},"gain":{number(record.gain)},'
            f'"sent_bytes":{record.sent_bytes},"wire_bytes":{record.wire_bytes},'
            f'"predicted_s":{number(record.predicted_s)},"measured_s":{sum(record.phases_s.values())}'
        )

    def _open(self) -> None:
        """Open this rank's file."""
        global active
        if active is not None:
            raise ConfigurationError(f"trace: '{active._path}' is being written already; finish() it first")
        folder = os.path.dirname(self._path) or "."
        reached = os.access(folder, os.W_OK)
        if os.path.isdir(self._path) or (self._rank == 0 and not reached):
            raise ConfigurationError(f"trace: '{self._path}' cannot be written; make its folder, or name another file")
        name = f"{self._path}.rank-{self._rank}"
        self._part = name if reached else os.path.join(tempfile.gettempdir(), os.path.basename(name))
        try:
            self._file = open(self._part, "w", encoding="utf-8")  # noqa: SIM115, closed in _stop
        except OSError as error:
            raise ConfigurationError(f"trace: '{self._part}' cannot be written: {error}") from error
        active = self

    def _write(self, lines: str) -> None:
        """Write lines; a disk that is full ends the trace of this rank, and not the training."""
        if self._file is not None:
            try:
                self._file.write(lines)
                self._file.flush()
            except OSError as error:
                warnings.warn(f"trace: no more is written to '{self._part}': {error}", stacklevel=5)
                self._close()

    def _stop(self) -> None:
        """Write what is there, and then no more."""
        self.flush()
        self._close()

    def _close(self) -> None:
        """Write no more."""
        global active
        if active is self:
            active = None
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # told when it was written to
                file.close()

    def _leave(self, remove: bool) -> None:
        if remove and self._part:
            with contextlib.suppress(OSError):
                os.remove(self._part)
        if self._owned:
            self._transport.close()
