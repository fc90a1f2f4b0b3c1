"""One step of a reducer: `begin`, `exchange` of each bucket, `commit`.

Until `commit` a step changes nothing but buckets that are exchanged, so that it can be undone on all ranks alike.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import ArraySpec, is_finite
from mpicomp.collectives import Result
from mpicomp.collectives.scheme import cause_of
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.wire import Selection
from mpicomp.errors import AgreedRankFailure, MessageError, MpicompError, RankFailedError
from mpicomp.gpu import HOST
from mpicomp.gpu.routes import choose_routes, run_on_device
from mpicomp.policies import BucketOutcome, StepReport
from mpicomp.reducer import trace
from mpicomp.reducer.agreement import NO_EXTRA, ExtraExchange, Signature, agree, no_memory, settings_of_step
from mpicomp.reducer.bucket import Bucket
from mpicomp.reducer.layout import LARGE_BUCKET
from mpicomp.reducer.record import BucketExchange, StepRecord, Tally, nonfinite_error
from mpicomp.rounds import Round, Rounds, gather_rows
from mpicomp.setting_checks import to_number
from mpicomp.system import stopping

if TYPE_CHECKING:
    from mpicomp.reducer.reducer import Reducer

_FLAG = np.dtype(np.uint8)
_NOTHING = np.empty(0, np.float32)
_ACTIVITY = "step %d, bucket %d ('%s' ...) by %s"


class Step:
    """One step, on one rank: `check_gradients`, `begin`, `exchange` of each bucket, `commit`, `finish`."""

    def __init__(self, reducer: "Reducer", scale: float = 1.0, extra: ExtraExchange = NO_EXTRA) -> None:
        self._reducer = reducer
        self._layout = reducer.layout
        self._transport = reducer.transport
        self._extra = extra
        self._requested_scale = self._scale = scale
        self._record = StepRecord(reducer.count)
        self._done: list[BucketExchange] = []
        self._nonfinite: list[BucketExchange] = []
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
        self._damaged: MessageError | None = None  # error of this rank in reading a message
        self._memories: list[tuple[Bucket, dict[str, Any]]] = []
        self._sums: list[tuple[Bucket, Accumulated]] = []  # made over gradients that lie in a bucket
        self._transport.log = []
        if self._layout.stages:
            self._layout.begin_step()

    def check_gradients(self, gradients: Mapping[str, Any], absent: Collection[str], lr: Any) -> None:
        """Check the gradients of this rank, which asks all ranks to agree if something is new or wrong."""
        reducer, extra = self._reducer, self._extra
        if lr is not None:
            try:
                self._record.lr = to_number("reduce", "lr", lr)
            except MpicompError as error:
                self._unread = error
        self._look(gradients, absent)
        known = self._known and (not absent or extra.idle or all(name in self._layout.conditional for name in absent))
        self._stale = (
            self._problem is not None or not known or extra.stale
            or reducer.loaded is not None or reducer.must_check_ranks or (not reducer.stop and stopping.asked())
        )  # fmt: skip
        if not self._stale and self._layout.entry.clip is not None:
            self._scale = self._clipped_scale()

    def _look(self, gradients: Mapping[str, Any], absent: Collection[str]) -> None:
        layout = self._layout
        self._gradients, self._absent = gradients, absent
        self._problem, self._made, self._known = self._unread, None, False
        try:
            members = self._members = layout.describer.describe(gradients)
            self._known = members is layout.members or layout.knows(members)
            if not self._known:
                layout.check(members)
                self._made = layout.make(members, gradients)
            if not layout.describer.on_host:
                layout.prefetch(gradients)
        except MpicompError as error:
            self._problem = error
        except MemoryError as error:  # mostly here, where a step's arrays are made; later ones are used again
            self._problem = no_memory(error, "reduce")

    def gradients_of(self, bucket: Bucket) -> list[Any] | None:
        """Return the gradients of a bucket; None if the ranks have to agree first."""
        return None if self._stale else list(map(self._gradients.__getitem__, bucket.names))

    def begin(self) -> Rounds[None]:
        """Let the policy prepare the step. As rounds."""
        if self._extra.frozen:
            return
        transport, record = self._transport, self._record
        begin, waited_s = transport.timer(), 0.0
        exchange = self._reducer.planner.refresh(transport)
        if exchange:
            transport.set_activity("step %d", record.step)
            tally = Tally()
            yield from tally.count(exchange, transport.group)
            record.once_wire_bytes += tally.wire_bytes
            waited_s = tally.waited_s
        record.choosing_s += transport.timer() - begin - waited_s

    def exchange(self, bucket: Bucket, gradients: Sequence[Any] | None, ready: float) -> Rounds[None]:
        """Exchange one bucket, ready at a time of the timer; None for gradients asks all to agree. As rounds."""
        reducer, record, frozen = self._reducer, self._record, self._extra.frozen
        transport, planner = self._transport, reducer.planner
        timer = transport.timer
        nested = dict in map(type, bucket.memory.values())
        self._memories.append((bucket, _copied(bucket.memory) if nested else dict(bucket.memory)))
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
            if gradients is not None and not self._layout.describer.on_host:
                gradients = self._layout.inputs_of(bucket, gradients)
            may_be_overwritten = True
            if bucket.holds_gradients:
                may_be_overwritten = plan.scheme.overwrites and (yield from self._do_all_hold(bucket, gradients))
                last = done.start = timer()
            survey = None if frozen else planner.survey(bucket.index)
            accumulated = bucket.accumulate(gradients, self._scale)
            accumulated.may_be_overwritten = may_be_overwritten
            if bucket.holds_gradients and gradients is not None:
                self._sums.append((bucket, accumulated))
            if survey is not None and gradients is not None:
                # Before the exchange, which may overwrite the sum.
                with bucket.device.active():
                    array, begin = accumulated.array(), timer()
                    done.survey = survey.measure(array, accumulated.residual, bucket.sizes, reducer.count)
                survey_s = timer() - begin
                record.choosing_s += survey_s
                last = done.start = done.start + survey_s  # as if the survey came first: it is no part of `compress_s`
            if bucket.changes(plan.scheme, may_be_overwritten):
                self._release_buffers()
                bucket.release(plan.scheme, may_be_overwritten)
            context = bucket.context_of(transport.group, reducer.count, reducer.seed)
            exchange = plan.scheme.exchange(accumulated, context)
            if bucket.device is not HOST:
                sources = plan.scheme.compressor.gpu_sources
                compile_ahead = accumulated.kernels.compile_ahead
                with bucket.device.active():
                    bucket.workspace.made(("compiled", sources), lambda: compile_ahead(sources, bucket.dtype))
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
        if result.stale:
            done.survey = None
        if result.leaves == "sum" and not isinstance(result.sent, Selection):
            with bucket.device.active():
                bucket.settle(accumulated, result)
        accumulated.may_be_overwritten = result.leaves != "sum"  # where it is not, the sum is still there
        self._done.append(done)
        if result.nonfinite:
            self._nonfinite.append(done)

    def _release_buffers(self) -> None:
        """Drop arrays that records hold, as a bucket's plan changes: what the last one needed is released."""
        for entry in self._transport.log or ():
            entry.task = entry.task.shape()
        for done in self._done:
            done.release_buffers()
        for done in self._reducer.last_step.exchanges if self._reducer.last_step is not None else ():
            done.release_buffers()
            done.result.mean = done.result.sent = _NOTHING

    def _do_all_hold(self, bucket: Bucket, gradients: Sequence[Any] | None) -> Rounds[bool]:
        """Ask before gradients are overwritten whether all ranks hold them in the bucket. As rounds."""
        tally, holds = Tally(), gradients is not None and bucket.holds(gradients)
        answers = yield from tally.count(self._share([holds]), self._transport.group)
        self._record.overhead_bytes += tally.sent_bytes
        self._record.overhead_wire_bytes += tally.wire_bytes
        return bool(answers.all())

    def commit(self, finite: bool) -> Rounds[dict[str, Any]]:
        """Keep the step or undo it, the same on all ranks, and return the means; none if it was ended. As rounds."""
        reducer, record, layout, transport = self._reducer, self._record, self._layout, self._transport
        outside, group = reducer.outside_tally, transport.group
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
        unused: Collection[str] = ()
        if layout.conditional:
            unused = yield from outside.count(self._unused(), group)
        overflows = bool(self._nonfinite)
        if overflows and reducer.nonfinite == "raise" and self._damaged is None and not reducer.survives:
            yield from outside.count(self._find_overflow(), group)
        finite = finite and not overflows
        if self._extra.has_shards:
            finite = self._extra.agree_finite(finite)
        # Applied by all that are left, or by none: later errors may occur on some of them alone.
        if reducer.survives and not transport.agree(True):
            raise AgreedRankFailure("a rank has died, as all that are left have agreed")
        reducer.count += 1
        reducer.last_step = record
        record.exchanges = self._done
        if outside.sent_bytes or outside.wire_bytes:
            record.overhead_bytes += outside.sent_bytes
            record.overhead_wire_bytes += outside.wire_bytes
            reducer.outside_tally = Tally()
        if reducer.lost_ranks:
            record.lost_ranks, reducer.lost_ranks = reducer.lost_ranks, []
        record.stop = reducer.stop
        for done in self._done:
            reducer.plans[done.bucket.index] = done.plan
        means = self._keep_or_undo(unused, finite) if self._damaged is None else {}
        try:
            yield from self._report_to_policy(finite)
        except RankFailedError:
            if not reducer.survives:
                raise
            reducer.failed = RankFailedError("a rank has died")  # the step is applied, here and elsewhere
        if self._damaged is not None:  # in the last message: no later one could have informed the others
            self.undo()
            reducer.must_check_ranks = True
            raise MessageError(
                f"{self._damaged} (on rank {group.rank}); nothing was applied on this rank, and at the next step all "
                "ranks compare whether that is so on all of them"
            )
        return means

    def _keep_or_undo(self, unused: Collection[str], finite: bool) -> dict[str, Any]:
        """Keep residuals or leave them as they were, and return the means."""
        reducer, record, layout = self._reducer, self._record, self._layout
        timer = self._transport.timer
        if not finite and reducer.nonfinite != "pass":
            self.undo()
        if not finite and reducer.nonfinite == "raise":
            raise nonfinite_error(record.step, self._nonfinite, self._overflowed)
        record.skipped = not finite and reducer.nonfinite == "skip"
        means: dict[str, Any] = {}
        for bucket, done in zip(layout.buckets, self._done, strict=True):
            begin, result = timer(), done.result
            if bucket.device is HOST:
                mean = bucket.skip(result.mean) if record.skipped else bucket.commit(result, finite)
            else:
                with bucket.device.active():
                    mean = bucket.skip(result.mean) if record.skipped else bucket.commit(result, finite)
            means |= layout.unflatten(bucket, mean, self._gradients, unused)
            done.commit_s = timer() - begin
        if layout.empty:
            means |= layout.unflatten_empty(self._gradients, unused)
        if len(self._done) == 1 and self._members is layout.members and not layout.empty:
            return means  # in the order of the gradients
        return {name: means[name] for name in self._gradients if name in means}

    def _report_to_policy(self, finite: bool) -> Rounds[None]:
        """Let the policy learn from the step's results, and start the ranks' telemetry. As rounds."""
        reducer, record = self._reducer, self._record
        if self._extra.frozen:
            return
        transport, telemetry, planner = self._transport, reducer.telemetry, reducer.planner
        begin, tally = transport.timer(), None
        outcomes, surveys = [], {}
        for done in self._done:
            result = done.result
            outcomes.append(BucketOutcome(result.energy, result.gain, result.kept))
            if done.survey is not None:
                surveys[done.bucket.index] = done.survey
        if telemetry.is_due(record.step):
            tally = Tally()
            yield from tally.count(telemetry.share_work(record.step), transport.group)
        record.slowest_rank, record.slowest_costs_s = telemetry.slowest_rank, telemetry.slowest_costs_s
        if finite and not record.skipped:
            planner.on_step_end(record.step, outcomes)
        if telemetry.has_arrived(record.step):
            tally = tally or Tally()
            yield from tally.count(telemetry.receive(planner, record.step), transport.group)
        if self._done and (surveys or planner.wants_telemetry):
            tally = tally or Tally()
            times = np.array([done.times(transport.offset) for done in self._done])
            report = StepReport(record.step, record.lr, [done.plan for done in self._done], outcomes, times, surveys)
            yield from tally.count(telemetry.publish(report, planner), transport.group)
        record.choosing_s += transport.timer() - begin
        if tally is not None:
            record.choosing_s -= tally.waited_s
            record.overhead_bytes += tally.sent_bytes
            record.overhead_wire_bytes += tally.wire_bytes

    def undo(self) -> None:
        """Restore the memories of compressors and collectives, and gradients, to those before the step."""
        for bucket, memory in reversed(self._memories):
            bucket.memory = memory
        self._memories.clear()
        for bucket, accumulated in self._sums:
            bucket.restore_gradients(accumulated, self._scale)
        self._sums.clear()

    def _keep_overwritten(self) -> None:
        """Keep what was exchanged of buckets whose gradients are gone: all ranks took part, so means stand for them."""
        kept = {id(done.bucket) for done in self._done if done.result.leaves != "sum" and done.bucket.holds_gradients}
        for done in self._done:
            if id(done.bucket) in kept:
                bucket, result = done.bucket, done.result
                with bucket.device.active():
                    mean = bucket.commit(result, not result.nonfinite)
                    bucket.replace_gradients(mean, self._scale)
        self._memories = [(bucket, memory) for bucket, memory in self._memories if id(bucket) not in kept]
        self._sums = [(bucket, accumulated) for bucket, accumulated in self._sums if id(bucket) not in kept]

    def finish(self, begin: float, waited_s: float | None = None) -> None:
        """Record the seconds of the step, of which ``waited_s``, or those of its rounds, were spent waiting."""
        reducer, record = self._reducer, self._record
        end = self._transport.timer()
        applied = reducer.last_step is record
        if applied:
            record.seconds = end - begin
            for listener in tuple(trace.listeners):
                listener.on_step(record, self._done, reducer.number, self._transport)
            if waited_s is None:
                waited_s = 0.0
                for done in self._done:
                    waited_s += done.exchange_s
        reducer.telemetry.note_work(end, waited_s or 0.0, applied and not record.agreed)

    def _agree(self) -> Rounds[bool]:
        """Compare the ranks' arrays, lay out new buckets, and exchange them; False if the step ends here. As rounds."""
        record, layout, outside = self._record, self._layout, self._reducer.outside_tally
        log = self._transport.log = []
        cut_short = Tally()
        for done in self._done:
            cut_short.merge(done.tally())
        self._keep_overwritten()
        self.undo()
        yield from self._reducer.telemetry.drop()
        gradients = yield from self._extra.agree((self._gradients, self._absent))
        if gradients is None:
            cut_short.add_log(log)
            outside.merge(cut_short)
            return False
        if gradients[0] is not self._gradients:
            self._look(*gradients)
        yield from self._compare_ranks()
        members = self._members
        assert members is not None
        absent = yield from self._absences([member.name for member in members])
        cut_short.add_log(log)
        record.agreed = True
        record.overhead_bytes += cut_short.sent_bytes
        record.overhead_wire_bytes += cut_short.wire_bytes
        if self._made is not None:  # if only `absent` differs, buckets stay, and with them what policies have learned
            yield from self._lay_out(members)
        names = {member.name for member in members}
        conditional = dict.fromkeys([*layout.conditional, *sorted(absent)])
        layout.conditional = [name for name in conditional if name in names]
        self._done.clear()
        self._nonfinite.clear()
        self._stale = False
        self._scale = self._clipped_scale()
        ready = self._transport.timer()
        for bucket in layout.buckets:
            yield from self.exchange(bucket, self.gradients_of(bucket), ready)
        return True

    def _compare_ranks(self) -> Rounds[None]:
        """Raise on all ranks if their arrays, settings or states differ; load a loaded state into the policy."""
        reducer, planner, loaded = self._reducer, self._reducer.planner, self._reducer.loaded
        signature = None
        if self._members is not None:
            signature = Signature(settings_of_step(reducer, self._gradients.values()), self._members)
        before = planner.state_dict()
        try:
            if loaded is not None:
                loaded.load_into(planner, self._transport.group)
        except MpicompError as error:
            # That it is no state of this policy says more than that it differs from the other ranks'.
            self._problem, signature = self._problem or error, None
        try:
            yield from agree(signature, self._problem or self._damaged, self._transport.group)
        except MpicompError:
            if loaded is not None:
                planner.load_state_dict(before, None)
            raise
        if loaded is not None:
            reducer.plans, reducer.count, reducer.loaded = {}, loaded.step, None
        self._record.step = reducer.count
        reducer.must_check_ranks = self._agrees = False

    def _lay_out(self, members: list[ArraySpec]) -> Rounds[None]:
        """Make buckets of other arrays, and let the policy begin with them. As rounds."""
        reducer, record, layout, transport = self._reducer, self._record, self._layout, self._transport
        group, planner, buckets = transport.group, reducer.planner, self._made
        assert buckets is not None
        once, routes = Tally(), Tally()
        if layout.bucket_bytes is None:
            total = sum(member.numel * member.work_dtype.itemsize for member in members)
            limit = yield from once.count(planner.bucket_limit(total, transport), group)
            layout.bucket_bytes = LARGE_BUCKET if limit is None else min(limit, LARGE_BUCKET)
            buckets = layout.make(members, self._gradients)
        yield from routes.count(choose_routes([bucket.device for bucket in buckets], transport), group)
        record.overhead_bytes += once.sent_bytes + routes.sent_bytes
        record.overhead_wire_bytes += routes.wire_bytes
        yield from once.count(planner.start([bucket.shape for bucket in buckets], transport), group)
        record.once_wire_bytes += once.wire_bytes
        layout.adopt(members, buckets)
        layout.prefetch(self._gradients)
        reducer.plans = {}

    def _absences(self, names: list[str]) -> Rounds[list[str]]:
        """Return those of these names that some rank has no gradient for, and note whether some rank is to stop."""
        flags = [name in self._absent and not self._extra.idle for name in sorted(names)]
        stop, *absent = (yield from self._share([stopping.asked(), *flags])).T
        self._reducer.stop = self._reducer.stop or bool(stop.any())
        return [name for name, ranks in zip(sorted(names), absent, strict=True) if ranks.any()]

    def _unused(self) -> Rounds[set[str]]:
        """Return the conditional arrays that no rank has a gradient for, the same on all ranks."""
        conditional = self._layout.conditional
        flags = yield from self._share([name in self._absent for name in conditional])
        return {name for name, ranks in zip(conditional, flags.T, strict=True) if ranks.all()}

    def _share(self, flags: list[bool]) -> Rounds[NDArray[np.uint8]]:
        """Return the flags of all ranks, a row for each. As rounds."""
        return (yield from gather_rows(np.array(flags, _FLAG), self._transport.group))

    def _find_overflow(self) -> Rounds[None]:
        """Determine, the same on all ranks, whether gradients are finite, so that the exchange has overflowed."""
        finite = all(map(is_finite, self._gradients.values()))
        self._overflowed = not (yield from self._share([not finite])).any()

    def _clipped_scale(self) -> float:
        """Return the factor of this rank's gradients that also clips them."""
        size = self._transport.group.size
        return self._requested_scale * self._layout.clip_factor(self._gradients, self._requested_scale, size)


def _copied(memory: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a memory: its values are replaced, never written to, but for memories in it."""
    copied = dict(memory)
    for key, value in memory.items():
        if type(value) is dict:
            copied[key] = _copied(value)
    return copied
