"""One step of a reducer: `begin`, `exchange` of each bucket, `commit`.

Until `commit` a step changes nothing but buckets that are exchanged, so that it can be undone on all ranks alike.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import plugins
from mpicomp.arrays import ArraySpec, to_host
from mpicomp.collectives import Result
from mpicomp.collectives.scheme import cause_of
from mpicomp.device import HOST, on_device
from mpicomp.errors import ConfigurationError, MessageError, MpicompError, NonFiniteError, RankFailedError
from mpicomp.policies import BucketOutcome, StepReport
from mpicomp.reducer import trace
from mpicomp.reducer.agreement import (
    NO_EXTRA,
    ExtraExchange,
    Signature,
    agree,
    no_memory,
    policy_digest,
)
from mpicomp.reducer.bucket import Bucket, layers_of
from mpicomp.reducer.layout import LARGE_BUCKET
from mpicomp.reducer.record import BucketExchange, StepRecord, Tally
from mpicomp.rounds import Round, Rounds, gather_rows
from mpicomp.system import stopping
from mpicomp.transport.gpu_routes import choose_routes, run_on_device

if TYPE_CHECKING:
    from mpicomp.reducer.reducer import Reducer

_FLAG = np.dtype(np.uint8)
_BFLOAT16_EXPONENT = 0x7F80  # bits that are all set in infinity and NaN
_ACTIVITY = "step %d, bucket %d ('%s' ...) by %s"
AGREED = "a rank has died, as all that are left have agreed"
"""Of an error after which they need not agree again."""


class Step:
    """One step, on one rank: `begin`, `check_gradients`, `exchange` of each bucket, `commit`, `finish`.

    Parameters
    ----------
    reducer : Reducer
        Its state is changed by `commit` alone.
    scale : float
        Factor that gradients are multiplied by first.
    extra : ExtraExchange
        What else belongs to the step.
    """

    def __init__(self, reducer: "Reducer", scale: float = 1.0, extra: ExtraExchange = NO_EXTRA) -> None:
        self._reducer = reducer
        self._extra = extra
        self._asked_scale = self._scale = scale
        self._record = StepRecord(reducer.count)
        self._done: list[BucketExchange] = []
        self._gradients: Mapping[str, Any] = {}
        self._absent: Collection[str] = ()
        self._members: list[ArraySpec] | None = None
        self._made: list[Bucket] | None = None  # for other arrays than those of the layout
        self._known = False  # whether the arrays are the layout's
        self._problem: MpicompError | None = None  # with the arrays
        self._unread: MpicompError | None = None  # with other arguments
        self._stale = False  # whether this rank asks all of them to agree
        self._agrees = False  # whether some rank asks, the same on all ranks
        self._overflowed = False  # whether finite gradients have become infinite in the exchange
        self._damaged: MessageError | None = None  # what this rank could not read
        self._memories: list[tuple[Bucket, dict[str, Any]]] = []
        reducer.transport.log.clear()
        reducer.layout.begin_step()

    def begin(self) -> Rounds[None]:
        """Let the policy prepare the step. As rounds."""
        if self._extra.frozen:
            return
        reducer, record = self._reducer, self._record
        transport, tally = reducer.transport, Tally()
        begin = transport.timer()
        transport.set_activity("step %d", reducer.count)
        yield from tally.count(reducer.planner.refresh(transport), transport.group)
        record.once_wire_bytes += tally.wire_bytes
        record.choosing_s += transport.timer() - begin - tally.waited_s

    def check_gradients(self, gradients: Mapping[str, Any], absent: Collection[str], lr: Any) -> None:
        """Check the gradients of this rank, which asks all ranks to agree where something is new or wrong.

        Parameters
        ----------
        gradients, absent
            See `mpicomp.Reducer.reduce`.
        lr : number or None
            The learning rate, for the record and the policy.
        """
        reducer, extra = self._reducer, self._extra
        if lr is not None:
            try:
                self._record.lr = _number("lr", lr)
            except MpicompError as error:
                self._unread = error
        self._look(gradients, absent)
        known = self._known and (not absent or extra.idle or all(name in reducer.layout.conditional for name in absent))
        self._stale = (
            self._problem is not None or not known or extra.stale
            or reducer.loaded is not None or reducer.must_check_ranks or (stopping.asked() and not reducer.stop)
        )  # fmt: skip
        if not self._stale and reducer.layout.entry.clip is not None:
            self._scale = self._asked_scale * self._clip()

    def _look(self, gradients: Mapping[str, Any], absent: Collection[str]) -> None:
        layout = self._reducer.layout
        self._gradients, self._absent = gradients, absent
        self._problem, self._made, self._known = self._unread, None, False
        try:
            self._members = layout.describer.describe(gradients)
            self._known = layout.knows(self._members)
            if not self._known:
                layout.check(self._members)
                self._made = layout.make(self._members, gradients)
            layout.prefetch(gradients)
        except MpicompError as error:
            self._problem = error
        except MemoryError as error:  # mostly here, where a step's arrays are made; later ones are used again
            self._problem = no_memory(error, "reduce")

    def gradients_of(self, bucket: Bucket) -> list[Any] | None:
        """Return the gradients of a bucket; None where the ranks have to agree first."""
        return None if self._stale else [self._gradients[name] for name in bucket.names]

    def exchange(self, bucket: Bucket, gradients: Sequence[Any] | None, ready: float) -> Rounds[None]:
        """Exchange one bucket; None for the gradients asks all ranks to agree. As rounds, in order.

        ``ready`` is when gradients were handed over, on the transport's timer.
        """
        reducer, record, frozen = self._reducer, self._record, self._extra.frozen
        transport, planner = reducer.transport, reducer.planner
        timer = transport.timer
        self._memories.append((bucket, _copied(bucket.memory)))
        if self._damaged is not None:
            gradients = None  # so that the others receive it
        begin = timer()
        plan = (reducer.plans.get(bucket.index) if frozen else None) or planner.plan(bucket.index)
        transport.set_activity(_ACTIVITY, reducer.count, bucket.index, bucket.names[0], plan.scheme.id)
        last = timer()
        record.choosing_s += last - begin
        done = BucketExchange(bucket, plan, ready, last, frozen, transport.group)
        show = trace.Phases().show if trace.markers else None
        try:
            if show is not None:
                show("compress")
            arrays = None if gradients is None else reducer.layout.inputs_of(bucket, gradients)
            accumulated = bucket.accumulate(arrays, self._scale)
            context = bucket.context_of(transport.group, reducer.count, reducer.seed)
            exchange = plan.scheme.exchange(accumulated, context)
            if bucket.device is not HOST:
                exchange = run_on_device(bucket.device, exchange)
            reply: Any = None
            while True:
                try:
                    request = exchange.send(reply)
                except StopIteration as stop:
                    result: Result = stop.value
                    break
                if show is not None:
                    show("exchange")
                begin = timer()
                done.compress_s += begin - last
                reply = yield request
                last = timer()
                done.exchange_s += last - begin
                done.requests.append((request, begin, last))
                if type(request) is Round and request.once:
                    part = transport.group.part(request.group)
                    assert part is not None
                    record.once_wire_bytes += request.wire_bytes(part)
                if show is not None:
                    show("decode")
        except MessageError as error:
            self._damaged, self._agrees = self._damaged or cause_of(error), True
            return
        finally:
            if show is not None:
                show(None)
        done.result, done.end = result, timer()
        done.decode_s = done.end - last
        self._damaged = self._damaged or result.problem
        self._agrees = self._agrees or result.stale
        survey = None if frozen or result.stale else planner.survey(bucket.index)
        with bucket.device.active():
            energies = None
            if survey is not None:
                done.survey = survey.measure(accumulated.array(), accumulated.residual, bucket.sizes, reducer.count)
                energies = survey.energies(done.survey, bucket.sizes)
                record.choosing_s += timer() - done.end
            done.layers = layers_of(
                bucket.bounds, accumulated.array(), result.sent, energies, result.gain, result.thinned
            )
        self._done.append(done)

    def commit(self, finite: bool) -> Rounds[dict[str, Any]]:
        """Keep the step or undo it, the same on all ranks, and return the means; none where it was ended. As rounds.

        Parameters
        ----------
        finite : bool
            See `mpicomp.Reducer.reduce`.
        """
        reducer, record, layout = self._reducer, self._record, self._reducer.layout
        transport, outside = reducer.transport, reducer.outside_tally
        group = transport.group
        agrees = self._agrees or not layout.buckets  # without buckets no message could have carried the flag
        while agrees:
            if not (yield from self._agree()):
                return {}
            agrees = self._agrees
        if self._extra is not NO_EXTRA:
            try:
                finite = (yield from outside.count(self._extra.exchange(), group)) and finite
            except MpicompError:
                self.undo()
                raise
        used = (yield from outside.count(self._used(), group)) if layout.conditional else set()
        overflows = [done for done in self._done if done.result.nonfinite]
        if overflows and reducer.nonfinite == "raise" and self._damaged is None and not reducer.survives:
            yield from outside.count(self._find_overflow(), group)
        # Applied by all that are left, or by none: what comes behind this may fail on some of them alone.
        if reducer.survives and not transport.agree(True):
            raise RankFailedError(AGREED)
        reducer.count += 1
        reducer.last_step = record
        reducer.plans = {done.bucket.index: done.plan for done in self._done}
        record.exchanges = self._done
        record.overhead_bytes += outside.sent_bytes
        record.overhead_wire_bytes += outside.wire_bytes
        reducer.outside_tally = Tally()
        record.lost_ranks, reducer.lost_ranks = reducer.lost_ranks, []
        record.stop = reducer.stop
        means = self._keep_or_undo(used, finite) if self._damaged is None else {}
        try:
            yield from self._report_to_policy(finite and not overflows)
        except RankFailedError:
            if not reducer.survives:
                raise
            reducer.failed = RankFailedError("a rank has died")  # the step is applied, here and elsewhere
        if self._damaged is not None:  # in the last message: nothing has followed that could tell the others
            self.undo()
            reducer.must_check_ranks = True
            raise MessageError(
                f"{self._damaged} (on rank {group.rank}); nothing was applied on this rank, and at the next step all "
                "ranks compare whether that is so on all of them"
            )
        return means

    def undo(self) -> None:
        """Restore the memories of compressors and collectives to those before the step."""
        for bucket, memory in reversed(self._memories):
            bucket.memory = memory
        self._memories.clear()

    def finish(self, begin: float, waited_s: float | None = None) -> None:
        """Record the seconds of the step since its beginning; it may have failed.

        In ``waited_s`` of them its thread waited for others; None stands for the rounds of its buckets.
        """
        reducer, record = self._reducer, self._record
        end = reducer.transport.timer()
        applied = reducer.last_step is record
        if applied:
            record.seconds = end - begin
            for listener in list(trace.listeners):
                listener.on_step(record, self._done, reducer.number, reducer.transport)
            if waited_s is None:
                waited_s = sum([done.exchange_s for done in self._done])
        reducer.telemetry.note_work(end, waited_s or 0.0, applied and not record.agreed)

    def _report_to_policy(self, finite: bool) -> Rounds[None]:
        """Let the policy learn from the step's results, and start the ranks' telemetry. As rounds."""
        reducer, record = self._reducer, self._record
        if self._extra.frozen:
            return
        transport, telemetry = reducer.transport, reducer.telemetry
        begin, tally = transport.timer(), Tally()
        delivered = [BucketOutcome(done.result.energy, done.result.gain, done.result.kept) for done in self._done]
        if telemetry.is_due(record.step):
            yield from tally.count(telemetry.share_work(record.step), transport.group)
        record.slowest_rank, record.slowest_costs_s = telemetry.slowest_rank, telemetry.slowest_costs_s
        if finite and not record.skipped:
            reducer.planner.on_step_end(record.step, delivered)
        if telemetry.under_way is not None:
            yield from tally.count(telemetry.receive(reducer.planner), transport.group)
        surveys = {done.bucket.index: done.survey for done in self._done if done.survey is not None}
        if self._done and (reducer.planner.wants_telemetry or surveys):
            times = np.array([done.times(transport.offset) for done in self._done])
            report = StepReport(record.step, record.lr, [done.plan for done in self._done], delivered, times, surveys)
            yield from tally.count(telemetry.publish(report), transport.group)
        record.choosing_s += transport.timer() - begin - tally.waited_s
        record.overhead_bytes += tally.sent_bytes
        record.overhead_wire_bytes += tally.wire_bytes

    def _agree(self) -> Rounds[bool]:
        """Compare the ranks' arrays, lay out new buckets, and exchange them; False where the step ends here."""
        reducer, record, layout = self._reducer, self._record, self._reducer.layout
        transport, outside = reducer.transport, reducer.outside_tally
        log = transport.log
        log.clear()
        cut_short = Tally()
        for done in self._done:
            cut_short.merge(done.tally())
        self.undo()
        yield from reducer.telemetry.drop()
        gradients = yield from self._extra.agree((self._gradients, self._absent))
        if gradients is None:
            outside.merge(cut_short)
            outside.sent_bytes += sum(entry.sent_bytes for entry in log)
            outside.wire_bytes += sum(entry.wire_bytes for entry in log)
            return False
        if gradients[0] is not self._gradients:
            self._look(*gradients)
        begins = reducer.count if reducer.loaded is None else reducer.loaded.step
        settings = reducer.settings | {"the step that follows": begins} | policy_digest(reducer.loaded, reducer.planner)
        settings["whether the last step was applied"] = not reducer.must_check_ranks
        settings["plugins"] = ", ".join(plugins.loaded()) or "none"
        named = reducer.planner.compressor
        if named.needs_identical_blas:
            where = "a GPU" if on_device(self._gradients.values()) else "the host"
            settings[f"where gradients are, with compressor '{named.id}',"] = where
        signature = None if self._members is None else Signature(settings, self._members)
        before = reducer.planner.state_dict()
        try:
            if reducer.loaded is not None:
                reducer.loaded.load_into(reducer.planner, transport.group)
        except MpicompError as error:
            # That it is no state of this policy says more than that it is another one than the other ranks'.
            self._problem, signature = self._problem or error, None
        try:
            yield from agree(signature, self._problem or self._damaged, transport.group)
        except MpicompError:
            if reducer.loaded is not None:
                reducer.planner.load_state_dict(before, None)
            raise
        if reducer.loaded is not None:
            reducer.plans = {}
        reducer.count = record.step = begins
        reducer.loaded, reducer.must_check_ranks = None, False
        self._agrees = False
        members = self._members
        assert members is not None
        absent = yield from self._absences([member.name for member in members])
        # What only `absent` has made stale keeps its buckets, and with them what policies have learnt.
        buckets, once_wire_bytes = self._made, 0.0
        if buckets is not None and layout.bucket_bytes is None:
            known = sum(entry.wire_bytes for entry in log)
            total = sum(member.numel * member.work_dtype.itemsize for member in members)
            limit = yield from reducer.planner.bucket_limit(total, transport)
            layout.bucket_bytes = LARGE_BUCKET if limit is None else min(limit, LARGE_BUCKET)
            buckets = layout.make(members, self._gradients)
            once_wire_bytes = sum(entry.wire_bytes for entry in log) - known
        if buckets is not None:
            yield from choose_routes([bucket.device for bucket in buckets], transport)
        record.agreed = True
        agreed_wire_bytes = sum(entry.wire_bytes for entry in log) - once_wire_bytes
        record.overhead_bytes += cut_short.sent_bytes + sum(entry.sent_bytes for entry in log)
        record.overhead_wire_bytes += cut_short.wire_bytes + agreed_wire_bytes
        self._done.clear()
        if buckets is not None:
            yield from reducer.planner.start([bucket.shape for bucket in buckets], transport)
            layout.adopt(members, buckets)
            layout.prefetch(self._gradients)
            reducer.plans = {}
        record.once_wire_bytes += sum(entry.wire_bytes for entry in log) - agreed_wire_bytes
        names = {member.name for member in members}
        layout.conditional = [name for name in [*layout.conditional, *sorted(absent)] if name in names]
        layout.conditional = list(dict.fromkeys(layout.conditional))
        self._stale = False
        self._scale = self._asked_scale * self._clip()
        ready = transport.timer()
        for bucket in layout.buckets:
            yield from self.exchange(bucket, self.gradients_of(bucket), ready)
        return True

    def _absences(self, names: list[str]) -> Rounds[list[str]]:
        """Return those of these names that some rank has no gradient for, and note whether some rank is to stop."""
        flags = [name in self._absent and not self._extra.idle for name in sorted(names)]
        stop, *absent = (yield from self._share([stopping.asked(), *flags])).T
        self._reducer.stop = self._reducer.stop or bool(stop.any())
        return [name for name, ranks in zip(sorted(names), absent, strict=True) if ranks.any()]

    def _used(self) -> Rounds[set[str]]:
        """Return the conditional arrays that some rank has a gradient for, the same on all ranks."""
        conditional = self._reducer.layout.conditional
        flags = yield from self._share([name in self._absent for name in conditional])
        return {name for name, ranks in zip(conditional, flags.T, strict=True) if not ranks.all()}

    def _share(self, flags: list[bool]) -> Rounds[NDArray[np.uint8]]:
        """Return the flags of all ranks, a row for each. As rounds."""
        return (yield from gather_rows(np.array(flags, _FLAG), self._reducer.transport.group))

    def _find_overflow(self) -> Rounds[None]:
        """Find out, on all ranks alike, whether gradients are finite, so that the exchange has overflowed."""
        finite = all(_is_finite(to_host(gradient)) for gradient in self._gradients.values())
        self._overflowed = not (yield from self._share([not finite])).any()

    def _clip(self) -> float:
        """Return the factor that clips this rank's gradients: 1 without clipping, or if they are not finite."""
        layout = self._reducer.layout
        if layout.entry.clip is None:
            return 1.0
        energy = self._scale**2 * sum(
            bucket.energy(layout.inputs_of(bucket, [self._gradients[name] for name in bucket.names]))
            for bucket in layout.buckets
        )
        limit = layout.entry.clip / math.sqrt(self._reducer.transport.group.size)
        return limit / math.sqrt(energy) if limit**2 < energy < math.inf else 1.0

    def _keep_or_undo(self, used: set[str], finite: bool) -> dict[str, Any]:
        """Keep residuals or leave them as they were, and return the means."""
        reducer, record, layout = self._reducer, self._record, self._reducer.layout
        timer = reducer.transport.timer
        nonfinite = [done for done in self._done if done.result.nonfinite]
        finite = finite and not nonfinite
        if not finite and reducer.nonfinite != "pass":
            self.undo()
        if not finite and reducer.nonfinite == "raise":
            raise self._nonfinite_error(nonfinite)
        record.skipped = not finite and reducer.nonfinite == "skip"
        unused = set(layout.conditional) - used if layout.conditional else ()
        means: dict[str, Any] = {}
        for bucket, done in zip(layout.buckets, self._done, strict=True):
            begin = timer()
            mean = done.result.mean
            with bucket.device.active():
                if record.skipped:
                    mean[:] = 0
                else:
                    bucket.commit(done.result.sent, finite)
            means |= layout.unflatten(bucket, mean, self._gradients, unused)
            done.commit_s = timer() - begin
        if layout.empty:
            means |= layout.unflatten_empty(self._gradients, unused)
        if len(self._done) == 1 and self._members is layout.members and not layout.empty:
            return means  # in the order in which they came in
        return {name: means[name] for name in self._gradients if name in means}

    def _nonfinite_error(self, nonfinite: list[BucketExchange]) -> NonFiniteError:
        step = self._record.step
        names = " or ".join(f"'{done.bucket.names[0]}'" for done in nonfinite)
        where = f", in the bucket that starts with {names}" if nonfinite else ""
        if self._overflowed:
            plans = " or ".join(sorted({done.plan.scheme.compressor.id for done in nonfinite}))
            return NonFiniteError(
                f"reduce: gradients are finite, and {plans} overflowed at step {step}{where}: they, or "
                "their sum with the residual or over ranks, are too large for what it computes in; nothing was "
                "applied and the residuals are as they were. Clip or scale gradients, or use a wider wire"
            )
        return NonFiniteError(
            f"reduce: gradients must be finite, got NaN or infinity on some rank at step {step}{where}; "
            "nothing was applied and the residuals are as they were. nonfinite='skip' leaves such steps out"
        )


def _copied(memory: dict[str, Any]) -> dict[str, Any]:
    """Return a memory that stays as it is: what is in it is replaced and never written to, but for memories within."""
    return {key: _copied(value) if type(value) is dict else value for key, value in memory.items()} if memory else {}


def _is_finite(values: NDArray[Any]) -> bool:
    """Return whether all numbers are finite; bfloat16 comes as uint16."""
    if values.dtype == np.uint16:
        return bool((values & _BFLOAT16_EXPONENT != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(values).all())


def _number(name: str, value: Any) -> float:
    """Return a number of whatever type it came in; 0-dimensional arrays and tensors are among them."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(f"reduce: {name} must be a number or None, got {value!r}") from None
