"""The reducer: gradients in, their mean over ranks out, and nothing lost in between."""

import copy
import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import Described, describe, from_host, to_host
from mpicomp.collectives import Context, Result, Round, dense_ring_bytes
from mpicomp.compressors import Compressor, Dense, get_compressor
from mpicomp.cost import CostModel
from mpicomp.errors import ClosedError, ConfigurationError, MpicompError, NonFiniteError, UnknownNameError
from mpicomp.policies import Plan, Policy, Selector, Static, list_policies
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.reducer.bucket import Bucket, make_buckets
from mpicomp.reducer.record import BucketRecord, StepRecord
from mpicomp.reducer.timer import Timer
from mpicomp.transport import Transport
from mpicomp.transport.base import Asked

_NONFINITE = ("raise", "skip", "pass")
_SCHEMA = 1
_STATES = ("residuals", "velocities")  # arrays that live from step to step, each a method of Bucket

Rounds = Generator[Asked, Any, Any]


class Reducer:
    """Averages named gradients over ranks, compressed, with error feedback.

    To rounding, over all ranks: sum of ``gradient + residual before`` equals ``ranks x mean`` plus sum of ``residual
    after``. The mean has the same bits on every rank.

    Creating one, `reduce` and `close` are collective over ``comm``.

    Parameters
    ----------
    compressor : Compressor, str, mapping or None
        An object, a name or a configuration (see `mpicomp.get_compressor`). None lets mpicomp choose, which is
        dense until there is a policy that chooses.
    collective : str
        A name from `mpicomp.list_collectives`; one that is built upon another may name it behind a colon, as in
        ``"star-topk:ring"``. ``"auto"`` takes at every step and for every bucket the one of least predicted
        time, exchanges without compression among them; see ``cost``.
    policy : str or None
        ``"static"``, ``"auto"`` or None: static where a compressor is named, auto where none is.
    feedback : bool or None
        Whether what a step does not send is kept for the next one. None does what the compressor declares.
    nonfinite : {"raise", "skip", "pass"}
        What happens on all ranks when a gradient holds NaN or infinity on some rank. ``"raise"`` raises
        `NonFiniteError`; ``"skip"`` delivers zeros; both leave the residuals as they were. ``"pass"``
        delivers what comes out and keeps it out of the residuals.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.
    bucket_bytes : int
        Arrays are exchanged in flat buckets of about this size, in the order in which they are first passed.
    seed : int
        For schemes that draw random numbers; the same on all ranks.
    threads : int
        How many threads of this rank share a sweep over a large array.
    cost : CostModel, str or None
        What is known of links, operations and kernels, or the file that ``mpicomp bench collectives --calibrate`` wrote
        it to; that of rank 0 counts. A copy of it learns from every step, see `cost`. With None, ``collective="auto"``
        measures for about a second before the first step, once a process for each layout of ranks
        (``MPICOMP_PROBE=0``: not at all), and a collective that was named is taken without predicting anything.

    Raises
    ------
    ConfigurationError
        For a setting that cannot be; `UnknownNameError` and `IncompatiblePairError` are kinds of it.

    Examples
    --------
    One process is a world of one rank:

    >>> import numpy as np
    >>> from mpicomp import Reducer, TopK
    >>> from mpicomp.transport import LocalWorld
    >>> reducer = Reducer(TopK(ratio=0.25), comm=LocalWorld(1).transports[0])
    >>> mean = reducer.reduce({"weight": np.array([[1, -4], [2, 3]], np.float32)})
    >>> mean["weight"].tolist()
    [[0.0, -4.0], [0.0, 0.0]]
    >>> reducer.residual("weight").tolist()
    [[1.0, 0.0], [2.0, 3.0]]
    """

    def __init__(
        self,
        compressor: Compressor | str | Mapping[str, Any] | None = None,
        collective: str = "auto",
        policy: str | None = None,
        feedback: bool | None = None,
        nonfinite: str = "raise",
        comm: Any = None,
        *,
        bucket_bytes: int = 32 << 20,
        seed: int = 0,
        threads: int = 1,
        cost: CostModel | str | None = None,
    ) -> None:
        if policy is not None and policy not in list_policies():
            raise UnknownNameError("policy", policy, list_policies())
        if nonfinite not in _NONFINITE:
            raise UnknownNameError("nonfinite", nonfinite, _NONFINITE)
        if feedback not in (None, True, False):
            raise ConfigurationError(f"reducer: feedback must be None, True or False, got {feedback!r}")
        if bucket_bytes < 1:
            raise ConfigurationError(f"reducer: bucket_bytes must be at least 1, got {bucket_bytes}")
        if not isinstance(threads, int) or threads < 1:
            raise ConfigurationError(f"reducer: threads must be at least 1, got {threads!r}")
        self._compressor = Dense() if compressor is None else get_compressor(compressor)
        self._feedback = self._compressor.feedback if feedback is None else feedback
        self._policy: Policy
        if collective == "auto":
            self._policy = Selector(self._compressor, None, self._feedback, cost)
        elif cost is not None:
            self._policy = Selector(self._compressor, [collective], self._feedback, cost)
        else:
            self._policy = Static(self._compressor, collective)
        self._entry = self._compressor.entry
        _check_feedback(self._compressor, self._feedback)
        self._nonfinite = nonfinite
        self._bucket_bytes = bucket_bytes
        self._seed = seed
        self._threads = threads
        self._settings = {
            "compressor": self._compressor.get_config(),
            "collective": collective,
            "feedback": self._feedback,
            "nonfinite": nonfinite,
            "bucket_bytes": bucket_bytes,
            "seed": seed,
        }
        self._members: list[Described] | None = None
        self._buckets: list[Bucket] = []
        self._kept: dict[str, dict[str, NDArray[np.floating]]] = {kind: {} for kind in _STATES}
        self._memories: dict[str, dict[str, Any]] = {}
        self._delivered: dict[str, NDArray[np.uint16]] = {}
        self._step = 0
        self._closed = False
        self.last_step: StepRecord | None = None
        """What the last call of `reduce` did on this rank."""
        self._owned = not isinstance(comm, Transport)
        self._transport = _transport(comm)
        self._timer = Timer(self._transport.group.size)

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self._compressor

    @property
    def feedback(self) -> bool:
        """Whether error feedback is on."""
        return self._feedback

    @property
    def cost(self) -> CostModel | None:
        """What is known of links, operations and kernels; None before the first step or where nothing is predicted."""
        return self._policy.cost

    @property
    def transport(self) -> Transport:
        """What runs the rounds."""
        return self._transport

    def reduce(self, gradients: Mapping[str, Any], lr: float | None = None) -> dict[str, Any]:
        """Average gradients over the ranks.

        Collective: all ranks call it with the same names, shapes and dtypes, in the same order at the first call.
        Names that were never passed before, or that are missing, are compared among ranks and then accepted.

        Parameters
        ----------
        gradients : mapping of str to array
            NumPy, CuPy or torch arrays of float16, bfloat16, float32 or float64, of any shape and strides. They are not
            modified. 16-bit ones are summed, and their residuals kept, in float32.
        lr : float, optional
            The learning rate of this step, for the record and for policies.

        Returns
        -------
        dict of str to array
            The means: of the kind, dtype and shape of the gradients, valid until the next call. NumPy arrays are
            read-only; torch and CuPy know no such thing, and theirs are not to be written to either.

        Raises
        ------
        ArrayTypeError
            For arrays that cannot be reduced, on all ranks before any data moves.
        DisagreementError
            Where ranks were given different things, on all ranks before any data moves.
        NonFiniteError
            With ``nonfinite="raise"``, on all ranks; residuals are as they were.
        ClosedError
            After `close`.
        """
        means: dict[str, Any] = self._transport.run(self.rounds(gradients, lr))
        return means

    def rounds(self, gradients: Mapping[str, Any], lr: float | None = None) -> Rounds:
        """Do what `reduce` does as a generator of rounds, for ranks that live in one process.

        See `mpicomp.transport.LocalWorld`.
        """
        if self._closed:
            raise ClosedError("reducer: it was closed; make a new one")
        start = time.perf_counter()
        log = self._transport.log
        log.clear()
        record = StepRecord(step=self._step, lr=lr)
        members, problem = None, None
        try:
            members = describe(gradients)
            if not self._is_known(members):
                self._check_residuals(members)
        except MpicompError as error:
            problem = error
        stale = problem is not None or not self._is_known(members)

        done = None
        if self._buckets:
            begin = time.perf_counter()
            yield from self._policy.refresh(self._transport)
            record.choosing_s += time.perf_counter() - begin
            done = yield from self._exchange(None if stale else gradients, record)
            stale = any(result.stale for result in done.results)
        if not self._buckets or stale:  # without buckets no message could have carried the flag
            record.buckets.clear()
            yield from self._timer.drop()
            signature = None if members is None else Signature(self._settings, members)
            yield from agree(signature, problem, self._transport.group)
            assert members is not None
            record.agreed = True
            record.overhead_bytes = sum(entry.sent_bytes for entry in log)
            record.overhead_wire_bytes = sum(entry.wire_bytes for entry in log)
            buckets = make_buckets(members, self._feedback, self._bucket_bytes, self._entry, self._threads)
            yield from self._policy.start([bucket.shape for bucket in buckets], self._transport)
            record.once_wire_bytes = sum(entry.wire_bytes for entry in log) - record.overhead_wire_bytes
            self._adopt(members, buckets)
            done = yield from self._exchange(gradients, record)
        assert done is not None
        self._step += 1
        self.last_step = record
        try:
            means = self._finish(gradients, done, record)
            if self._policy.measures:
                begin = time.perf_counter()
                sent_bytes = yield from self._timer.turn(self._policy, done.plans, done.times)
                record.overhead_bytes += sent_bytes
                record.overhead_wire_bytes += sent_bytes
                record.choosing_s += time.perf_counter() - begin
            return means
        finally:
            record.seconds = time.perf_counter() - start

    def residual(self, name: str) -> NDArray[np.floating]:
        """Give a copy of what error feedback holds for an array, shaped like it.

        Zeros without feedback. 16-bit arrays have float32 residuals.

        Raises
        ------
        UnknownNameError
            Where no such array was reduced.
        """
        for member in self._members or ():
            if member.name == name:
                held = self._held("residuals").get(name)
                return np.zeros(member.shape, member.work_dtype) if held is None else held.reshape(member.shape).copy()
        if name in self._kept["residuals"]:
            return self._kept["residuals"][name].copy()
        raise UnknownNameError("residual", name, [member.name for member in self._members or ()])

    def state_dict(self) -> dict[str, Any]:
        """Give what has to survive a restart, on this rank.

        Returns
        -------
        dict
            ``schema``, ``step``, ``settings``; ``residuals`` and ``velocities`` (of momentum correction): dicts of name
            to array, copied; ``memories``: what compressors have learnt, by the first name of each bucket.
        """
        memories = {bucket.members[0].name: bucket.memory for bucket in self._buckets if bucket.memory}
        return {
            "schema": _SCHEMA,
            "step": self._step,
            "settings": dict(self._settings),
            "memories": copy.deepcopy(self._memories | memories),
        } | {kind: {name: own.copy() for name, own in self._states(kind).items()} for kind in _STATES}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave. Each rank loads its own; not collective.

        Raises
        ------
        ConfigurationError
            Where the state is none of a reducer's, or a residual's shape is not its array's. Nothing is loaded then.
        """
        if not isinstance(state, Mapping) or state.get("schema") != _SCHEMA or "residuals" not in state:
            raise ConfigurationError("reducer: the state is not one that Reducer.state_dict gave; nothing was loaded")
        loaded = {
            kind: {name: np.array(value, copy=True) for name, value in state.get(kind, {}).items()} for kind in _STATES
        }
        for member in self._members or ():
            for arrays in loaded.values():
                held = arrays.get(member.name)
                _check_shape(member, None if held is None else held.shape)
        self._step = int(state["step"])
        self._kept = loaded
        self._memories = copy.deepcopy(dict(state.get("memories", {})))
        for kind in _STATES:
            for own in self._held(kind).values():
                own[:] = 0
        self._restore()

    def close(self) -> None:
        """Give back what it holds of MPI. Collective; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._transport.run(self._timer.drop())
            if self._owned:
                self._transport.close()

    def _is_known(self, members: list[Described] | None) -> bool:
        if members is None or self._members is None:
            return False
        return members == self._members or set(members) == set(self._members)

    def _adopt(self, members: list[Described], buckets: list[Bucket]) -> None:
        """Lay out buckets anew; residuals follow their names, and wait for those that are gone."""
        for kind in _STATES:
            self._kept[kind] = {name: own.copy() for name, own in self._states(kind).items()}
        self._memories |= {bucket.members[0].name: bucket.memory for bucket in self._buckets}
        self._members = members
        self._buckets = buckets
        self._delivered = {
            member.name: np.empty(member.numel, np.uint16) for member in members if member.dtype.endswith("float16")
        }
        self._restore()

    def _check_residuals(self, members: list[Described]) -> None:
        """Refuse arrays whose residual has another shape."""
        shapes = {name: residual.shape for name, residual in self._kept["residuals"].items()}
        if self._feedback:
            shapes |= {member.name: member.shape for member in self._members or ()}
        for member in members:
            _check_shape(member, shapes.get(member.name))

    def _restore(self) -> None:
        for kind in _STATES:
            for name, own in self._held(kind).items():
                if name in self._kept[kind]:
                    own[:] = self._kept[kind].pop(name).reshape(-1)
        for bucket in self._buckets:
            bucket.memory = self._memories.pop(bucket.members[0].name, bucket.memory)

    def _held(self, kind: str) -> dict[str, NDArray[np.floating]]:
        """Give the buckets' arrays of a kind of state by name: flat, writable."""
        if not self._feedback:
            return {}
        parts = (getattr(bucket, kind)() for bucket in self._buckets)
        return {member.name: part for members in parts for member, part in members}

    def _states(self, kind: str) -> dict[str, NDArray[np.floating]]:
        """Give all arrays of a kind of state by name, in their shapes; those that wait for their names come last."""
        shapes = {member.name: member.shape for member in self._members or ()}
        held = {name: own.reshape(shapes[name]) for name, own in self._held(kind).items()}
        empty = {name: np.zeros(shape) for name, shape in shapes.items() if 0 in shape and self._feedback}
        return held | (empty if kind == "residuals" else {}) | self._kept[kind]

    def _exchange(self, gradients: Mapping[str, Any] | None, record: StepRecord) -> Generator[Round, Any, "_Done"]:
        """Exchange all buckets; None for the gradients takes part with zeros and asks all ranks to agree anew."""
        done = _Done()
        clock = self._transport.clock
        last = clock()
        arrays: dict[str, NDArray[Any]] = {}
        if gradients is not None:
            arrays = {member.name: to_host(gradients[member.name]) for member in self._members or ()}
        scale = self._scale(arrays)
        for bucket in self._buckets:
            begin = time.perf_counter()
            plan = self._policy.plan(bucket.index)
            record.choosing_s += time.perf_counter() - begin
            own = [arrays[member.name] for member in bucket.members] if gradients is not None else None
            context = Context(
                group=self._transport.group,
                step=self._step,
                bucket=bucket.index,
                seed=self._seed,
                memory=bucket.memory,
                workspace=bucket.workspace,
            )
            start = clock()
            result, phases = yield from _timed(plan.scheme.exchange(bucket.accumulate(own, scale), context), clock)
            compress_s, decode_s, _ = phases
            end = clock()
            done.times.append((last, end, start - last + compress_s + decode_s))
            last = end
            done.plans.append(plan)
            done.results.append(result)
            record.buckets.append(self._describe_bucket(bucket, plan, result, phases))
        return done

    def _scale(self, arrays: Mapping[str, NDArray[Any]]) -> float:
        """Give what clips this rank's gradients: 1, if not asked to or if they are not finite."""
        if self._entry.clip is None or not arrays:
            return 1.0
        energy = sum(b.energy([arrays[member.name] for member in b.members]) for b in self._buckets)
        limit = self._entry.clip / math.sqrt(self._transport.group.size)
        return limit / math.sqrt(energy) if limit**2 < energy < math.inf else 1.0

    def _describe_bucket(
        self, bucket: Bucket, plan: Plan, result: Result, phases: tuple[float, float, int]
    ) -> BucketRecord:
        compress_s, decode_s, rounds = phases
        entries = self._transport.log[-rounds:] if rounds else []
        compressor = plan.scheme.compressor
        return BucketRecord(
            bucket=bucket.index,
            parameters=len(bucket.members),
            numel=bucket.numel,
            compressor=compressor.get_config(),
            collective=plan.scheme.id,
            reason=plan.reason,
            ratio=getattr(compressor, "ratio", None),
            ratio_reached=result.kept / bucket.numel,
            gain=result.gain if np.isfinite(result.gain) else None,
            phases_s={
                "compress": compress_s,
                "exchange": sum(entry.seconds for entry in entries),
                "decode": decode_s,
            },
            predicted_s=plan.prediction.seconds if plan.prediction else None,
            predicted_phases_s=plan.prediction.phases() if plan.prediction else None,
            sent_bytes=sum(entry.sent_bytes for entry in entries),
            wire_bytes=sum(entry.wire_bytes for entry in entries),
            dense_wire_bytes=dense_ring_bytes(bucket.numel, self._transport.group.size),
            rounds=[entry.operation for entry in entries],
        )

    def _finish(self, gradients: Mapping[str, Any], done: "_Done", record: StepRecord) -> dict[str, Any]:
        """Keep the step or undo it, the same on all ranks, and give the means."""
        bad = [bucket for bucket, result in zip(self._buckets, done.results, strict=True) if result.nonfinite]
        if bad and self._nonfinite == "raise":
            names = " or ".join(f"'{bucket.members[0].name}'" for bucket in bad)
            raise NonFiniteError(
                f"reduce: gradients must be finite, got NaN or infinity on some rank at step {record.step}, in the "
                f"bucket that starts with {names}; nothing was applied and the residuals are as they were. "
                "nonfinite='skip' leaves such steps out"
            )
        record.skipped = bool(bad) and self._nonfinite == "skip"
        means: dict[str, Any] = {}
        for place, (bucket, result) in enumerate(zip(self._buckets, done.results, strict=True)):
            begin = self._transport.clock()
            if record.skipped:
                result.mean[:] = 0
            else:
                bucket.commit(result.sent, finite=not bad)
            for member, mean in bucket.parts(result.mean):
                means[member.name] = from_host(mean, member, gradients[member.name], self._delivered.get(member.name))
            start, end, own = done.times[place]
            kept_s = self._transport.clock() - begin
            done.times[place] = start, end + kept_s, own + kept_s
        for member in self._members or ():
            if member.numel == 0:
                empty = np.empty(0, member.work_dtype)
                means[member.name] = from_host(empty, member, gradients[member.name], self._delivered.get(member.name))
        return {name: means[name] for name in gradients}


@dataclass
class _Done:
    """What exchanging the buckets came to, a bucket each; of times the start, the end and the own work.

    What it takes to keep the residual and to hand out the mean comes later and counts as if it had followed at once.
    """

    results: list[Result] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    times: list[tuple[float, float, float]] = field(default_factory=list)


def _timed(
    exchange: Generator[Round, Any, Result], clock: Callable[[], float]
) -> Generator[Round, Any, tuple[Result, tuple[float, float, int]]]:
    """Run a scheme and measure its own work: seconds before its last round, seconds after it, and the rounds."""
    before, last, rounds = 0.0, 0.0, 0
    received = None
    while True:
        start = clock()
        try:
            task = exchange.send(received)
        except StopIteration as stop:
            last = clock() - start
            return stop.value, (before, last, rounds)
        before += clock() - start
        rounds += 1
        received = yield task


def _check_feedback(compressor: Compressor, feedback: bool) -> None:
    if feedback and not compressor.contractive:
        raise ConfigurationError(
            f"{compressor.id}: {compressor!r} is unbiased and not contractive, so what it keeps back would grow from "
            "step to step; leave feedback out, or use its unscaled form"
        )
    if not feedback and compressor.entry.momentum:
        raise ConfigurationError(
            f"{compressor.id}: momentum correction keeps what was not sent, which needs error feedback; "
            "leave feedback out, or set momentum=0"
        )


def _check_shape(member: Described, shape: tuple[int, ...] | None) -> None:
    if shape is not None and shape != member.shape:
        raise ConfigurationError(
            f"reducer: the residual of '{member.name}' has shape {shape} and cannot be kept for shape {member.shape}; "
            "make a new Reducer to start it at zero"
        )


def _transport(comm: Any) -> Transport:
    if isinstance(comm, Transport):
        return comm
    from mpicomp.transport.mpi import MPITransport  # starts MPI, which import mpicomp must not

    return MPITransport(comm)
