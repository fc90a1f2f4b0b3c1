"""Listeners to steps: a trace of all ranks on one clock, for Perfetto or Chrome's tracing, and ranges for profilers.

Each rank writes its steps to a file of its own, so that a job that dies leaves it; in the end the first rank merges all
files, see `mpicomp.reducer.trace_merge`. Without listeners a step makes no call for them.
"""

import contextlib
import functools
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np

from mpicomp.errors import ConfigurationError, RankFailedError
from mpicomp.reducer.agreement import run_collectively
from mpicomp.reducer.record import BucketExchange, StepRecord
from mpicomp.reducer.trace_merge import RankInfo, merge, packed
from mpicomp.rounds import WORLD, Group, Round, layout_groups
from mpicomp.transport import Transport
from mpicomp.transport.clocks import compare_clocks
from mpicomp.transport.connect import connect

_FLUSH_S = 0.25  # seconds after which steps are written: a job that dies loses no more
_MAX_STEPS = 256  # steps that are kept until then
_ALL_TO_ALL = ("allreduce", "allgatherv", "alltoallv")  # operations in which every rank receives from every other


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


class trace:  # noqa: N801, it reads as what it does: with mpicomp.trace(...)
    """Write the steps of the ranks' reducers to one file, on one clock, for Perfetto or Chrome's tracing.

    Making it and `finish` are collective over ``comm``, and so is the end of a ``with`` block without an error. After
    an error the end of the block waits for no rank.

    Parameters
    ----------
    path : str
        The file, which rank 0 writes in the end. Until then each rank writes to its own file four times a second:
        ``PATH.rank-N``, or a temporary file on a host without that folder. These are removed when ``path`` is complete,
        and stay if the job dies: ``mpicomp trace`` merges them.
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
    >>> from mpicomp.transport import LocalWorld
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
        self._path = os.fspath(path)
        self._part = ""
        self._rank = transport.group.rank  # the name of this one, also after another has died
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._tracks: dict[int, int] = {}  # by number of the reducer
        self._file: IO[bytes] | None = None
        self._flushed = time.perf_counter()
        self._finished = False
        self._steps: list[tuple[Any, ...]] = []
        try:
            run_collectively(self._open, transport, "trace")
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
        host = layout[self._rank] if layout else 0
        self._write(packed(tuple(RankInfo(self._rank, host, transport.group.size, self._error))))

    def flush(self) -> None:
        """Write the steps so far to this rank's file. Not collective."""
        with self._lock:
            self._drain()

    def finish(self) -> None:
        """End the trace and merge the ranks' files. Collective; a second call does nothing.

        If ranks have died and the others continue on this transport, the trace has the steps of the others; on another
        transport the ranks' files stay as they are, with a warning.
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

    def on_step(
        self, record: StepRecord, exchanges: Sequence[BucketExchange], reducer: int, transport: Transport
    ) -> None:
        if self._file is None or (transport.group.size > 1 and not transport.concurrent):
            return  # the file is closed, or ranks of one process are no ranks of the job
        now = time.perf_counter()
        since = None
        if threading.get_ident() == self._thread:
            since, self._left = self._left, now
        group, shift = transport.group, self._shift
        whole = group.size == self._transport.group.size
        buckets = [noted_bucket(exchange, shift, group, whole) for exchange in exchanges]
        with self._lock:
            # The order is that of NotedStep.
            self._steps.append((
                self._tracks.setdefault(reducer, len(self._tracks)), since and since + shift,
                now - record.seconds + shift, now + shift, buckets, record.step, record.lr, record.agreed,
                record.skipped, record.lost_ranks, record.choosing_s, record.once_wire_bytes, record.overhead_bytes,
                record.overhead_wire_bytes,
            ))  # fmt: skip
            if now - self._flushed > _FLUSH_S or len(self._steps) >= _MAX_STEPS:
                self._drain()

    def _drain(self) -> None:
        steps, self._steps = self._steps, []
        if steps:
            self._write(packed(steps))
        self._flushed = time.perf_counter()

    def _open(self) -> None:
        for other in listeners:
            if isinstance(other, trace):
                raise ConfigurationError(f"trace: '{other._path}' is being written already; finish() it first")
        folder = os.path.dirname(self._path) or "."
        reached = os.access(folder, os.W_OK)
        if os.path.isdir(self._path) or (self._rank == 0 and not reached):
            raise ConfigurationError(f"trace: '{self._path}' cannot be written; make its folder, or name another file")
        name = f"{self._path}.rank-{self._rank}"
        self._part = name if reached else os.path.join(tempfile.gettempdir(), os.path.basename(name))
        try:
            self._file = open(self._part, "wb")  # noqa: SIM115, closed in _stop
        except OSError as error:
            raise ConfigurationError(f"trace: '{self._part}' cannot be written: {error}") from error
        listeners.append(self)

    def _write(self, pack: bytes) -> None:
        """Write steps; a full disk ends the trace of this rank, and not the training."""
        if self._file is not None:
            try:
                self._file.write(pack)
                self._file.flush()
            except OSError as error:
                warnings.warn(f"trace: no more is written to '{self._part}': {error}", stacklevel=5)
                self._close()

    def _stop(self) -> None:
        """Write the steps so far, and no more."""
        self.flush()
        self._close()

    def _close(self) -> None:
        if self in listeners:
            listeners.remove(self)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # reported when it was written to
                file.close()

    def _leave(self, remove: bool) -> None:
        if remove and self._part:
            with contextlib.suppress(OSError):
                os.remove(self._part)
        if self._owned:
            self._transport.close()


def noted_bucket(done: BucketExchange, move: float, group: Group, whole: bool) -> tuple[Any, ...]:
    """Return the fields of a `NotedBucket`; ``move`` is added to times, for ``whole`` see `partners`."""
    record, rounds = done.record, []
    begun: dict[int, float] = {}  # of rounds in the background
    for request, begin, end in done.requests:
        task = request if isinstance(request, Round) else request.task
        if task.background and task is request:
            begun[id(task)] = begin
            continue
        about = partners(task, group, whole)
        rounds.append((task.operation, about, begin + move, end + move, begun.pop(id(task), begin) + move))
    return (
        done.start + move, rounds, record.bucket, record.parameters, record.numel, record.compressor, record.collective,
        record.reason, record.ratio, record.dense_wire_bytes, record.ratio_reached, record.gain, record.sent_bytes,
        record.wire_bytes, record.predicted_s, record.phases_s,
    )  # fmt: skip


def partners(task: Round, group: Group, whole: bool) -> dict[str, Any]:
    """Return the other ranks of a round, by their numbers in the whole group.

    ``group``, unless it is that of all ranks; ``from``: the ranks that this one needs to end the round, unless they are
    all; ``to``: the receiver of a message. If ``group`` is not the ``whole`` trace's, ranks are not distinguished.
    """
    if whole and task.group == WORLD and task.operation in _ALL_TO_ALL:
        return {}
    members = _members(group, task.group)
    about: dict[str, Any] = {} if task.group == WORLD else {"group": task.group}
    rank = group.rank
    if not whole:
        return about | {"from": []}
    match task.operation:
        case operation if operation in _ALL_TO_ALL:
            about["from"] = list(members)
        case "bcast" | "gatherv":
            root = members[task.root]
            receives = (rank == root) == (task.operation == "gatherv")
            about["from"] = (list(members) if rank == root else [root]) if receives else []
        case "sendrecv":
            to, source = task.peers
            about["from"] = [] if source is None else [members[source]]
            if to is not None:
                about["to"] = members[to]
        case "neighbor_alltoall" if task.graph is not None:
            about["from"] = [members[other] for other in task.graph.neighbours(members.index(rank))]
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


def _add_nvtx() -> None:
    """Show ranges by the package nvtx, if it is installed."""
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
