"""One step of a reducer: buckets are exchanged one by one, then all of it is kept or undone."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import plugins
from mpicomp.arrays import ArraySpec, to_host
from mpicomp.collectives.scheme import cause_of
from mpicomp.device import HOST, Device, MeanPart, on_device
from mpicomp.errors import ConfigurationError, MessageError, MpicompError, NonFiniteError, RankFailedError
from mpicomp.policies import BucketOutcome, StepReport
from mpicomp.reducer import tracing
from mpicomp.reducer.agreement import Signature, agree, no_memory
from mpicomp.reducer.beside import Beside
from mpicomp.reducer.bucket import Bucket
from mpicomp.reducer.core import Core
from mpicomp.reducer.exchange import Exchanged, exchange
from mpicomp.reducer.layout import LARGE_BUCKET
from mpicomp.reducer.record import StepRecord, Tally
from mpicomp.rounds import Rounds, gather_rows
from mpicomp.system import stopping
from mpicomp.transport.gpu_routes import choose_routes

_FLAG = np.dtype(np.uint8)
_BFLOAT16_EXPONENT = 0x7F80  # bits that are all set in infinity and NaN
AGREED = "a rank has died, as all that are left have agreed"
"""Of an error after which they need not agree again."""


class Step:
    """One step, on one rank.

    Parameters
    ----------
    core : Core
        Written to by `conclude` alone, but for buckets that are exchanged.
    scale : float
        Factor that gradients are multiplied by first.
    beside : Beside, optional
        What else belongs to it.
    """

    def __init__(self, core: Core, scale: float = 1.0, beside: Beside | None = None) -> None:
        self._core = core
        self._beside = Beside() if beside is None else beside
        self._asked_scale = self._scale = scale
        self._record = StepRecord(step=core.count)
        self._done: list[Exchanged] = []
        self._gradients: Mapping[str, Any] = {}
        self._absent: Collection[str] = ()
        self._members: list[ArraySpec] | None = None
        self._known = False  # whether they are the layout's
        self._made: list[Bucket] | None = None  # for other arrays than those of the layout
        self._problem: MpicompError | None = None
        self._unread: MpicompError | None = None  # what is wrong with what is no array
        self._stale = False
        self._overflowed = False  # whether finite gradients have become infinite in the exchange
        self._damaged: MessageError | None = None  # what this rank could not read
        self._told = False  # whether all ranks know that one of them could not
        self._memories: list[tuple[Bucket, dict[str, Any]]] = []
        core.transport.log.clear()
        core.staging.begin()

    def refresh(self) -> Rounds[None]:
        """Let the policy prepare the step before the first bucket. As rounds."""
        if self._beside.frozen:
            return
        begin = time.perf_counter()
        tally, transport = Tally(), self._core.transport
        transport.set_activity(f"step {self._core.count}")
        yield from tally.count(self._core.policy.refresh(transport), transport.group)
        self._record.once_wire_bytes += tally.wire_bytes
        self._record.choosing_s += time.perf_counter() - begin - tally.waited_s

    def exchange(self, bucket: Bucket, gradients: list[Any] | None, ready: float) -> Rounds[None]:
        """Exchange one bucket; None for the gradients asks all ranks to agree anew. As rounds, in order.

        ``ready`` is when gradients were handed over, on the transport's clock.
        """
        core = self._core
        if self._damaged is not None:
            gradients = None  # so that the others hear of it
        self._memories.append((bucket, _copied(bucket.memory)))
        try:
            done = yield from exchange(bucket, gradients, core, self._scale, self._beside.frozen, ready)
        except MessageError as error:
            self._damaged, self._told = self._damaged or cause_of(error), True
            return
        self._damaged = self._damaged or done.result.problem
        self._record.choosing_s += done.choosing_s
        self._record.once_wire_bytes += done.once_wire_bytes
        self._done.append(done)

    def examine(self, gradients: Mapping[str, Any], absent: Collection[str], lr: Any) -> None:
        """Check the gradients that this rank was given.

        Parameters
        ----------
        gradients : mapping of str to array
            See `mpicomp.Reducer.reduce`.
        absent : collection of str
            Those of them that stand for no gradient.
        lr : number or None
            The learning rate, for the record and the policy.
        """
        layout = self._core.layout
        try:
            self._record.lr = _number("lr", lr)
        except MpicompError as error:
            self._unread = error
        self._look(gradients, absent)
        known = self._known and (self._beside.idle or all(name in layout.conditional for name in absent))
        self._stale = self._problem is not None or not known or self._beside.stale or self._core.loaded is not None
        self._stale = self._stale or self._core.suspect or (stopping.asked() and not self._core.stop)
        if not self._stale:
            self._scale = self._asked_scale * self._clip()

    def _look(self, gradients: Mapping[str, Any], absent: Collection[str]) -> None:
        layout = self._core.layout
        self._gradients, self._absent = gradients, absent
        self._problem, self._made = self._unread, None
        self._known = False
        try:
            self._members = self._core.describer.describe(gradients)
            self._known = layout.knows(self._members)
            if not self._known:
                layout.check(self._members)
                self._made = layout.make(self._members, gradients)
            self._core.expect(gradients)
        except MpicompError as error:
            self._problem = error
        except MemoryError as error:  # mostly here, where a step's arrays are made; later ones are used again
            self._problem = no_memory(error, "reduce")

    def of(self, bucket: Bucket) -> list[Any] | None:
        """Return the gradients of a bucket, None where the ranks have to agree first."""
        return None if self._stale else [self._gradients[member.name] for member in bucket.members]

    def conclude(self, finite: bool) -> Rounds[Any]:
        """Keep the step or undo it, the same on all ranks, and return the means; none where it was ended. As rounds.

        Parameters
        ----------
        finite : bool
            See `mpicomp.Reducer.reduce`.
        """
        core, record = self._core, self._record
        # Without buckets no message could have carried the flag.
        asked = self._asked or not core.layout.buckets
        while asked:
            if not (yield from self._agree()):
                return {}
            asked = self._asked
        group = core.transport.group
        try:
            finite = (yield from core.outside.count(self._beside.exchange(), group)) and finite
        except MpicompError:
            self.forget()
            raise
        used = yield from core.outside.count(self._used(), group)
        infinite = any(done.result.nonfinite for done in self._done)
        if infinite and core.nonfinite == "raise" and self._damaged is None and not core.survives:
            yield from core.outside.count(self._find_overflow(), group)
        # Applied by all that are left, or by none: what comes behind this may fail on some of them alone.
        if core.survives and not core.transport.agree(True):
            raise RankFailedError(AGREED)
        core.count += 1
        core.last_step = record
        core.plans = {done.record.bucket: done.plan for done in self._done}
        record.buckets = [done.record for done in self._done]
        record.overhead_bytes += core.outside.sent_bytes
        record.overhead_wire_bytes += core.outside.wire_bytes
        core.outside = Tally()
        record.lost_ranks, core.lost = core.lost, []
        record.stop = core.stop
        means = self._finish(used, finite) if self._damaged is None else {}
        try:
            yield from self._tell()
        except RankFailedError:
            if not core.survives:
                raise
            core.failed = RankFailedError("a rank has died")  # the step is applied, here and elsewhere
        if self._damaged is not None:  # in the last message: nothing has followed that could tell the others
            self.forget()
            core.suspect = True
            raise MessageError(
                f"{self._damaged} (on rank {group.rank}); nothing was applied on this rank, and at the next step all "
                "ranks compare whether that is so on all of them"
            )
        return means

    @property
    def _asked(self) -> bool:
        """Whether some rank asks all of them to agree anew, the same on all."""
        return self._told or any(done.result.stale for done in self._done)

    def forget(self) -> None:
        """Restore the memories of compressors and collectives to those before the step."""
        for bucket, memory in reversed(self._memories):
            bucket.memory = memory
        self._memories.clear()

    def _tell(self) -> Rounds[None]:
        """Let the policy learn from the step's results, and start the ranks' telemetry."""
        core, record = self._core, self._record
        if self._beside.frozen:
            return
        delivered = [BucketOutcome(own.energy, own.gain, own.kept) for own in (done.result for done in self._done)]
        begin, tally, group = time.perf_counter(), Tally(), core.transport.group
        yield from tally.count(core.pace.tell(record.step), group)
        record.slowest_rank, record.slowest_costs_s = core.pace.slowest_rank, core.pace.slowest_costs_s
        finite = not any(done.result.nonfinite for done in self._done)
        if finite and not record.skipped:
            core.policy.on_step_end(record.step, delivered)
        yield from tally.count(core.telemetry.receive(core.policy), group)
        surveys = {done.record.bucket: done.survey for done in self._done if done.survey is not None}
        if self._done and (core.policy.wants_telemetry or surveys):
            times = np.array([(done.start, done.end, done.own_s, done.ready) for done in self._done])
            report = StepReport(record.step, record.lr, [done.plan for done in self._done], delivered, times, surveys)
            yield from tally.count(core.telemetry.publish(report), group)
        record.choosing_s += time.perf_counter() - begin - tally.waited_s
        record.overhead_bytes += tally.sent_bytes
        record.overhead_wire_bytes += tally.wire_bytes

    def note_seconds(self, begin: float, waited_s: float | None = None) -> None:
        """Record the seconds of the step since its beginning; it may have failed.

        In ``waited_s`` of them its thread waited for others; None stands for the rounds of its buckets.
        """
        end, record = time.perf_counter(), self._record
        if applied := self._core.last_step is record:
            record.seconds = end - begin
            if tracing.active is not None:
                tracing.active.step(record, self._done, self._core, record.seconds)
            waited_s = record.phases_s["exchange"] if waited_s is None else waited_s
        self._core.pace.note(end, waited_s or 0.0, applied and not record.agreed)

    def _agree(self) -> Rounds[bool]:
        """Compare the ranks' arrays, lay out buckets anew, and exchange them; False where the step ends here."""
        core, record, layout = self._core, self._record, self._core.layout
        log = core.transport.log
        log.clear()
        cut_short = Tally(
            sum(done.record.sent_bytes for done in self._done), sum(done.record.wire_bytes for done in self._done)
        )
        self.forget()
        yield from core.telemetry.drop()
        given = yield from self._beside.agree((self._gradients, self._absent))
        if given is None:
            core.outside.sent_bytes += cut_short.sent_bytes + sum(entry.sent_bytes for entry in log)
            core.outside.wire_bytes += cut_short.wire_bytes + sum(entry.wire_bytes for entry in log)
            return False
        if given[0] is not self._gradients:
            self._look(*given)
        begins = core.count if core.loaded is None else core.loaded.step
        settings = core.settings | {"the step that follows": begins} | core.loading()
        settings["whether the last step was applied"] = not core.suspect
        settings["plugins"] = ", ".join(plugins.loaded()) or "none"
        named = core.policy.compressor
        if named.needs_identical_blas:
            where = "a GPU" if on_device(self._gradients.values()) else "the host"
            settings[f"where gradients are, with compressor '{named.id}',"] = where
        signature = None if self._members is None else Signature(settings, self._members)
        before = core.policy.state_dict()
        try:
            core.take_up()
        except MpicompError as error:
            # That it is no state of this policy says more than that it is another one than the other ranks'.
            self._problem, signature = self._problem or error, None
        try:
            yield from agree(signature, self._problem or self._damaged, core.transport.group)
        except MpicompError:
            if core.loaded is not None:
                core.policy.load_state_dict(before, None)
            raise
        if core.loaded is not None:
            core.plans = {}
        core.count = record.step = begins
        core.loaded = None
        core.suspect = self._told = False
        members = self._members
        assert members is not None
        absent = yield from self._absences([member.name for member in members])
        # What only `absent` has made stale keeps its buckets, and with them what policies have learnt.
        buckets, once_wire_bytes = self._made, 0.0
        if buckets is not None and layout.bucket_bytes is None:
            known = sum(entry.wire_bytes for entry in log)
            total = sum(member.numel * member.work_dtype.itemsize for member in members)
            limit = yield from core.policy.bucket_limit(total, core.transport)
            layout.bucket_bytes = LARGE_BUCKET if limit is None else min(limit, LARGE_BUCKET)
            buckets = layout.make(members, self._gradients)
            once_wire_bytes = sum(entry.wire_bytes for entry in log) - known
        if buckets is not None:
            yield from choose_routes([bucket.device for bucket in buckets], core.transport)
        record.agreed = True
        agreed_wire_bytes = sum(entry.wire_bytes for entry in log) - once_wire_bytes
        record.overhead_bytes += cut_short.sent_bytes + sum(entry.sent_bytes for entry in log)
        record.overhead_wire_bytes += cut_short.wire_bytes + agreed_wire_bytes
        self._done.clear()
        if buckets is not None:
            yield from core.policy.start([bucket.shape for bucket in buckets], core.transport)
            layout.adopt(members, buckets)
            core.expect(self._gradients)
            core.plans = {}
        record.once_wire_bytes += sum(entry.wire_bytes for entry in log) - agreed_wire_bytes
        names = {member.name for member in members}
        layout.conditional = [name for name in [*layout.conditional, *sorted(absent)] if name in names]
        layout.conditional = list(dict.fromkeys(layout.conditional))
        self._stale = False
        self._scale = self._asked_scale * self._clip()
        ready = core.transport.clock()
        for bucket in layout.buckets:
            yield from self.exchange(bucket, self.of(bucket), ready)
        return True

    def _absences(self, names: list[str]) -> Rounds[list[str]]:
        """Return those of these names that some rank has no gradient for, and note whether some rank is to stop."""
        own = [name in self._absent and not self._beside.idle for name in sorted(names)]
        stop, *flags = (yield from self._share([stopping.asked(), *own])).T
        self._core.stop = self._core.stop or bool(stop.any())
        return [name for name, own_flags in zip(sorted(names), flags, strict=True) if own_flags.any()]

    def _used(self) -> Rounds[set[str]]:
        """Return the conditional arrays that some rank has a gradient for, the same on all ranks."""
        conditional = self._core.layout.conditional
        if not conditional:
            return set()
        flags = yield from self._share([name in self._absent for name in conditional])
        return {name for name, own in zip(conditional, flags.T, strict=True) if not own.all()}

    def _share(self, own: list[bool]) -> Rounds[NDArray[np.uint8]]:
        """Return everyone's flags, a row for each rank."""
        return (yield from gather_rows(np.array(own, _FLAG), self._core.transport.group))

    def _find_overflow(self) -> Rounds[None]:
        """Find out, on all ranks alike, whether gradients are finite, so that the exchange has overflowed."""
        finite = all(_is_finite(to_host(gradient)) for gradient in self._gradients.values())
        self._overflowed = not (yield from self._share([not finite])).any()

    def _clip(self) -> float:
        """Return the factor that clips this rank's gradients: 1 without clipping, or if they are not finite."""
        core = self._core
        if core.entry.clip is None:
            return 1.0
        energy = self._scale**2 * sum(
            bucket.energy([core.input_of(own.name, self._gradients[own.name]) for own in bucket.members])
            for bucket in core.layout.buckets
        )
        limit = core.entry.clip / math.sqrt(core.transport.group.size)
        return limit / math.sqrt(energy) if limit**2 < energy < math.inf else 1.0

    def _finish(self, used: set[str], finite: bool) -> dict[str, Any]:
        """Keep residuals or leave them as they were, and return the means."""
        core, record, layout = self._core, self._record, self._core.layout
        buckets = list(zip(layout.buckets, self._done, strict=True))
        bad = [bucket for bucket, done in buckets if done.result.nonfinite]
        finite = finite and not bad
        if not finite and core.nonfinite != "pass":
            self.forget()
        if not finite and core.nonfinite == "raise":
            names = " or ".join(f"'{bucket.members[0].name}'" for bucket in bad)
            where = f", in the bucket that starts with {names}" if bad else ""
            if self._overflowed:
                plans = " or ".join(
                    sorted({done.record.compressor["id"] for done in self._done if done.result.nonfinite})
                )
                raise NonFiniteError(
                    f"reduce: gradients are finite, and {plans} overflowed at step {record.step}{where}: they, or "
                    "their sum with the residual or over ranks, are too large for what it computes in; nothing was "
                    "applied and the residuals are as they were. Clip or scale gradients, or use a wider wire"
                )
            raise NonFiniteError(
                f"reduce: gradients must be finite, got NaN or infinity on some rank at step {record.step}{where}; "
                "nothing was applied and the residuals are as they were. nonfinite='skip' leaves such steps out"
            )
        record.skipped = not finite and core.nonfinite == "skip"
        unused = set(layout.conditional) - used
        means: dict[str, Any] = {}
        for bucket, done in buckets:
            begin = core.transport.clock()
            with bucket.device.active():
                if record.skipped:
                    done.result.mean[:] = 0
                else:
                    bucket.commit(done.result.sent, finite=finite)
                # What nobody has a gradient for is delivered all the same where the residual was sent.
                parts = [
                    (member, start)
                    for member, start in zip(bucket.members, bucket.offsets, strict=True)
                    if member.name not in unused or done.result.mean[start : start + member.numel].any()
                ]
            means |= self._give(done.result.mean, parts, bucket.device)
            done.add(core.transport.clock() - begin)
        for member in layout.members or ():
            if member.numel == 0 and member.name not in unused:
                means |= self._give(np.empty(0, member.work_dtype), [(member, 0)], HOST)
        return {name: means[name] for name in self._gradients if name in means}

    def _give(self, mean: Any, parts: Sequence[tuple[ArraySpec, int]], device: Device) -> dict[str, Any]:
        """Return the means of some arrays, of the kinds that came in, by name; ``parts`` says where each begins."""
        delivered = self._core.layout.delivered
        wanted = [
            MeanPart(start, member, self._gradients[member.name], delivered.get(member.name)) for member, start in parts
        ]
        means = self._core.staging.unflatten(mean, wanted) if device is HOST else device.unflatten(mean, wanted)
        return {part.described.name: own for part, own in zip(wanted, means, strict=True)}


def _copied(memory: dict[str, Any]) -> dict[str, Any]:
    """Return a memory that stays as it is: what is in it is replaced and never written to, but for memories within."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in memory.items()}


def _is_finite(values: NDArray[Any]) -> bool:
    """Return whether all numbers are finite; bfloat16 comes as uint16."""
    if values.dtype == np.uint16:
        return bool((values & _BFLOAT16_EXPONENT != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(values).all())


def _number(name: str, value: Any) -> float | None:
    """Return a number of whatever type it came in; 0-dimensional arrays and tensors are among them."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(f"reduce: {name} must be a number or None, got {value!r}") from None
