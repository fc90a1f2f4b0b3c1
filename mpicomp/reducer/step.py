"""One step of a reducer: buckets are exchanged one by one, then all of it is kept or undone."""

import math
import time
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import Described, describe
from mpicomp.collectives import Round
from mpicomp.compressors.base import Entry
from mpicomp.errors import MpicompError, NonFiniteError
from mpicomp.policies import Delivered, Policy, Told
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.reducer.bucket import Bucket
from mpicomp.reducer.exchange import Conditions, Exchanged, exchange
from mpicomp.reducer.layout import Layout
from mpicomp.reducer.record import StepRecord
from mpicomp.reducer.timer import Timer
from mpicomp.transport import Transport
from mpicomp.transport.base import Asked
from mpicomp.transport.staging import Staging

Rounds = Generator[Asked, Any, Any]

_FLAG = np.dtype(np.uint8)


@dataclass
class Core:
    """What steps work on.

    Attributes
    ----------
    settings : dict
        What has to be the same on all ranks.
    nonfinite : str
        What happens when some gradient is not finite.
    seed : int
        For schemes that draw random numbers.
    entry : Entry
        What happens to gradients first.
    layout : Layout
        Arrays and residuals.
    policy : Policy
        Chooses plans.
    transport : Transport
        Runs rounds.
    timer : Timer
        Tells ranks what steps took.
    count : int
        Steps so far.
    last_step : StepRecord or None
        What the last one did.
    staging : Staging
        Brings arrays of devices to the host and back.
    """

    settings: dict[str, Any]
    nonfinite: str
    seed: int
    entry: Entry
    layout: Layout
    policy: Policy
    transport: Transport
    timer: Timer
    count: int = 0
    last_step: StepRecord | None = None
    staging: Staging = field(default_factory=Staging)


class Step:
    """One step, on one rank.

    Parameters
    ----------
    core : Core
        Written to by `conclude` alone, but for buckets that are exchanged.
    scale : float
        What gradients are multiplied by first.
    """

    def __init__(self, core: Core, scale: float = 1.0) -> None:
        self._core = core
        self._scale = scale
        self._record = StepRecord(step=core.count)
        self._done: list[Exchanged] = []
        self._gradients: Mapping[str, Any] = {}
        self._absent: Collection[str] = ()
        self._members: list[Described] | None = None
        self._problem: MpicompError | None = None
        self._stale = False
        core.transport.log.clear()
        core.staging.begin()

    def refresh(self) -> Generator[Asked, Any, None]:
        """Let the policy do what it has to before the first bucket. As rounds."""
        begin = time.perf_counter()
        run, received = self._core.policy.refresh(self._core.transport), None
        while True:
            try:
                asked = run.send(received)
            except StopIteration:
                break
            if isinstance(asked, Round):
                part = self._core.transport.group.part(asked.group)
                self._record.once_wire_bytes += 0.0 if part is None else asked.wire_bytes(part)
            received = yield asked
        self._record.choosing_s += time.perf_counter() - begin

    def exchange(self, bucket: Bucket, gradients: list[Any] | None, ready: float) -> Generator[Asked, Any, None]:
        """Exchange one bucket; None for the gradients asks all ranks to agree anew. As rounds, in order.

        ``ready`` is when gradients were handed over, on the transport's clock.
        """
        core = self._core
        conditions = Conditions(core.transport, core.policy, core.count, core.seed, self._scale, core.staging)
        done = yield from exchange(bucket, gradients, conditions, ready)
        self._record.choosing_s += done.choosing_s
        self._record.once_wire_bytes += done.once_wire_bytes
        self._done.append(done)

    def examine(self, gradients: Mapping[str, Any], absent: Collection[str]) -> None:
        """Look at everything that this rank was given.

        Parameters
        ----------
        gradients : mapping of str to array
            See `mpicomp.Reducer.reduce`.
        absent : collection of str
            Those of them that stand for no gradient.
        """
        layout = self._core.layout
        self._gradients, self._absent = gradients, absent
        try:
            self._members = describe(gradients)
            if not layout.knows(self._members):
                layout.check(self._members)
            for name, gradient in gradients.items():
                self._core.staging.start(name, gradient)
        except MpicompError as error:
            self._problem = error
        known = layout.knows(self._members) and all(name in layout.conditional for name in absent)
        self._stale = self._problem is not None or not known
        if not self._stale:
            self._scale *= self._clip()

    def of(self, bucket: Bucket) -> list[Any] | None:
        """Give the gradients of a bucket, None where the ranks have to agree first."""
        return None if self._stale else [self._gradients[member.name] for member in bucket.members]

    def conclude(self, lr: float | None, finite: bool) -> Rounds:
        """Keep the step or undo it, the same on all ranks, and give the means. As rounds.

        Parameters
        ----------
        lr : float or None
            For the record.
        finite : bool
            See `mpicomp.Reducer.reduce`.
        """
        core, record = self._core, self._record
        record.lr = lr
        stale = any(done.result.stale for done in self._done)
        if not core.layout.buckets or stale:  # without buckets no message could have carried the flag
            yield from self._agree()
        core.count += 1
        core.last_step = record
        record.buckets = [done.record for done in self._done]
        used = yield from self._used()
        means = self._finish(used, finite)
        begin = time.perf_counter()
        yield from self._tell()
        record.choosing_s += time.perf_counter() - begin
        return means

    def _tell(self) -> Generator[Asked, Any, None]:
        """Let the policy learn what was delivered, and ranks tell each other what they have to."""
        core, record = self._core, self._record
        delivered = [Delivered(own.energy, own.gain, own.kept) for own in (done.result for done in self._done)]
        surveys = {done.record.bucket: done.survey for done in self._done if done.survey is not None}
        finite = not any(done.result.nonfinite for done in self._done)
        if finite and not record.skipped:
            core.policy.deliver(record.step, delivered)
        yield from core.timer.catch_up(core.policy)
        if self._done and (core.policy.listens or surveys):
            times = np.array([(done.start, done.end, done.own_s, done.ready) for done in self._done])
            told = Told(record.step, record.lr, [done.plan for done in self._done], delivered, times, {})
            sent_bytes = yield from core.timer.turn(told, surveys)
            record.overhead_bytes += sent_bytes
            record.overhead_wire_bytes += sent_bytes

    def note_seconds(self, seconds: float) -> None:
        """Write down what the step took; it may have failed."""
        if self._core.last_step is self._record:
            self._record.seconds = seconds

    def _agree(self) -> Generator[Asked, Any, None]:
        """Compare what ranks were given, lay out buckets anew, and exchange them."""
        core, record, layout = self._core, self._record, self._core.layout
        log = core.transport.log
        log.clear()
        yield from core.timer.drop()
        signature = None if self._members is None else Signature(core.settings, self._members)
        yield from agree(signature, self._problem, core.transport.group)
        members = self._members
        assert members is not None
        absent = yield from self._absences([member.name for member in members])
        record.agreed = True
        record.overhead_bytes = sum(entry.sent_bytes for entry in log)
        record.overhead_bytes += sum(done.record.sent_bytes for done in self._done)
        record.overhead_wire_bytes = sum(entry.wire_bytes for entry in log)
        record.once_wire_bytes -= record.overhead_wire_bytes
        record.overhead_wire_bytes += sum(done.record.wire_bytes for done in self._done)
        self._done.clear()
        # What only `absent` has made stale keeps its buckets, and with them what policies have learnt.
        if not layout.knows(members):
            buckets = layout.make(members)
            yield from core.policy.start([bucket.shape for bucket in buckets], core.transport)
            layout.adopt(members, buckets)
        record.once_wire_bytes += sum(entry.wire_bytes for entry in log)
        names = {member.name for member in members}
        layout.conditional = [name for name in [*layout.conditional, *sorted(absent)] if name in names]
        layout.conditional = list(dict.fromkeys(layout.conditional))
        if self._stale:
            self._stale = False
            self._scale *= self._clip()
        ready = core.transport.clock()
        for bucket in layout.buckets:
            yield from self.exchange(bucket, self.of(bucket), ready)

    def _absences(self, names: list[str]) -> Generator[Asked, Any, list[str]]:
        """Give those of these names that some rank has no gradient for, the same on all ranks."""
        if not names:
            return []
        flags = yield from self._share([name in self._absent for name in sorted(names)])
        return [name for name, own in zip(sorted(names), flags.T, strict=True) if own.any()]

    def _used(self) -> Generator[Asked, Any, set[str]]:
        """Give the conditional arrays that some rank has a gradient for, the same on all ranks."""
        conditional = self._core.layout.conditional
        if not conditional:
            return set()
        flags = yield from self._share([name in self._absent for name in conditional])
        self._record.overhead_bytes += len(conditional)
        self._record.overhead_wire_bytes += len(conditional) * (flags.shape[0] - 1)
        return {name for name, own in zip(conditional, flags.T, strict=True) if not own.all()}

    def _share(self, own: list[bool]) -> Generator[Asked, Any, NDArray[np.uint8]]:
        """Give everyone's flags, a row for each rank."""
        ranks = self._core.transport.group.size
        send = np.array(own, _FLAG)
        recv = np.empty(ranks * send.size, _FLAG)
        everyones = yield Round("allgatherv", [send.size] * ranks, _FLAG, send=send, recv=recv)
        flags: NDArray[np.uint8] = everyones.reshape(ranks, send.size)
        return flags

    def _clip(self) -> float:
        """Give what clips this rank's gradients: 1, if not asked to or if they are not finite."""
        core = self._core
        if core.entry.clip is None:
            return 1.0
        energy = self._scale**2 * sum(
            bucket.energy([core.staging.host(own.name, self._gradients[own.name]) for own in bucket.members])
            for bucket in core.layout.buckets
        )
        limit = core.entry.clip / math.sqrt(core.transport.group.size)
        return limit / math.sqrt(energy) if limit**2 < energy < math.inf else 1.0

    def _finish(self, used: set[str], finite: bool) -> dict[str, Any]:
        """Keep residuals or leave them as they were, and give the means."""
        core, record, layout = self._core, self._record, self._core.layout
        buckets = list(zip(layout.buckets, self._done, strict=True))
        bad = [bucket for bucket, done in buckets if done.result.nonfinite]
        finite = finite and not bad
        if not finite and core.nonfinite == "raise":
            names = " or ".join(f"'{bucket.members[0].name}'" for bucket in bad)
            where = f", in the bucket that starts with {names}" if bad else ""
            raise NonFiniteError(
                f"reduce: gradients must be finite, got NaN or infinity on some rank at step {record.step}{where}; "
                "nothing was applied and the residuals are as they were. nonfinite='skip' leaves such steps out"
            )
        record.skipped = not finite and core.nonfinite == "skip"
        unused = set(layout.conditional) - used
        means: dict[str, Any] = {}
        for bucket, done in buckets:
            begin = core.transport.clock()
            if record.skipped:
                done.result.mean[:] = 0
            else:
                bucket.commit(done.result.sent, finite=finite)
            for member, mean in bucket.parts(done.result.mean):
                # What nobody has a gradient for is delivered all the same where the residual was sent.
                if member.name not in unused or mean.any():
                    means[member.name] = self._give(mean, member)
            done.add(core.transport.clock() - begin)
        for member in layout.members or ():
            if member.numel == 0 and member.name not in unused:
                means[member.name] = self._give(np.empty(0, member.work_dtype), member)
        return {name: means[name] for name in self._gradients if name in means}

    def _give(self, mean: NDArray[np.floating], member: Described) -> Any:
        out = self._core.layout.delivered.get(member.name)
        return self._core.staging.give(mean, member, self._gradients[member.name], out)
