"""One bucket's exchange, with all that a record and a policy want to know of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Context, Result
from mpicomp.policies import Plan
from mpicomp.reducer import tracing
from mpicomp.reducer.bucket import Bucket
from mpicomp.reducer.core import Core
from mpicomp.reducer.layers import layers_of
from mpicomp.reducer.ranges import Ranges
from mpicomp.reducer.record import BucketRecord
from mpicomp.reducer.trace_notes import Span
from mpicomp.rounds import Group, Pending, Request, Rounds, dense_ring_bytes, observe
from mpicomp.transport.gpu_routes import run_on_device


@dataclass
class Exchanged:
    """Outcome of a bucket's exchange.

    Attributes
    ----------
    plan : Plan
        The plan that was run.
    result : Result
        The mean that it delivers, and this rank's share of it.
    record : BucketRecord
        Its record.
    ready, start, end : float
        Times at which gradients were handed over, and at which the exchange began and ended, on the clock that ranks
        share.
    choosing_s : float
        Seconds before the start and after the end that were spent on choosing the plan and on the policy's survey.
    own_s : float
        Seconds of own work in it. What it takes to keep the residual and to hand out the mean comes later; it
        counts as if it had followed at once.
    survey : array of float32 or None
        The survey that the policy has asked for; None where it has not.
    once_wire_bytes : float
        Bytes that left this rank in rounds that are made once in a run; they are in no other sum.
    spans : list of Span
        Its rounds, while a trace is written; else none.
    """

    plan: Plan
    result: Result
    record: BucketRecord
    choosing_s: float
    ready: float
    start: float
    end: float
    own_s: float
    survey: NDArray[np.float32] | None
    once_wire_bytes: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Count more own work."""
        self.end += seconds
        self.own_s += seconds


class _Watch:
    """Counts the bytes of a bucket's rounds, and the seconds in them and between them."""

    def __init__(self, clock: Callable[[], float], group: Group, start: float) -> None:
        self._clock, self._group = clock, group
        self.last = start  # when the last round ended
        self.own_s = self.waited_s = self.wire_bytes = self.once_wire_bytes = 0.0
        self.sent_bytes = 0
        self.operations: list[str] = []
        self.ranges = Ranges()
        self.ranges.show("compress")
        self.traced, self.spans = tracing.active is not None, list[Span]()
        self._asked = start

    def before(self, asked: Request) -> None:
        """Note that a round begins."""
        self._asked = self._clock()
        self.own_s += self._asked - self.last
        self.ranges.show("exchange")

    def after(self, asked: Request) -> None:
        """Note that it has ended."""
        self.last = self._clock()
        self.waited_s += self.last - self._asked
        self.ranges.show("decode")
        if self.traced:
            self.spans.append((asked, self._asked, self.last))
        if isinstance(asked, Pending):
            return
        part = self._group.part(asked.group)
        assert part is not None
        self.operations.append(asked.operation)
        if asked.once:
            self.once_wire_bytes += asked.wire_bytes(part)
        else:
            self.sent_bytes += asked.sent_bytes(part)
            self.wire_bytes += asked.wire_bytes(part)


def exchange(
    bucket: Bucket, gradients: Sequence[Any] | None, core: Core, scale: float, frozen: bool, ready: float
) -> Rounds[Exchanged]:
    """Exchange one bucket, as rounds.

    Parameters
    ----------
    bucket : Bucket
        The bucket to exchange.
    gradients : sequence of arrays or None
        One for each member; None takes part with zeros and asks all ranks to agree anew.
    core : Core
        The reducer's.
    scale : float
        Factor that gradients are multiplied by first.
    frozen : bool
        Whether the plan of the last step is run again, and the policy has no part in it.
    ready : float
        When gradients were handed over, on the clock that ranks share.
    """
    clock, group = core.transport.clock, core.transport.group
    begin = time.perf_counter()
    plan = (core.plans.get(bucket.index) if frozen else None) or core.policy.plan(bucket.index)
    choosing_s = time.perf_counter() - begin
    context = Context(
        group=group,
        step=core.count,
        bucket=bucket.index,
        seed=core.seed,
        memory=bucket.memory,
        workspace=bucket.workspace,
    )
    core.transport.set_activity(
        f"step {core.count}, bucket {bucket.index} ('{bucket.members[0].name}' ...) by {plan.scheme.id}"
    )
    start = clock()
    watch = _Watch(clock, group, start)
    try:
        arrays = None
        if gradients is not None:
            pairs = zip(bucket.members, gradients, strict=True)
            arrays = [core.input_of(member.name, own) for member, own in pairs]
        with bucket.device.active():
            accumulated = bucket.accumulate(arrays, scale)
        result = yield from observe(
            run_on_device(bucket.device, plan.scheme.exchange(accumulated, context)), watch.before, watch.after
        )
    finally:
        watch.ranges.show(None)
    end = clock()
    decode_s = end - watch.last
    begin = time.perf_counter()
    asked_for = None if frozen else core.policy.survey(bucket.index)
    survey = energies = None
    with bucket.device.active():
        if asked_for is not None and not result.stale:
            survey = asked_for.measure(accumulated.array(), accumulated.residual, bucket.sizes, core.count)
            energies = asked_for.energies(survey, bucket.sizes)
        choosing_s += time.perf_counter() - begin
        layers = layers_of(
            bucket.names, bucket.sizes, accumulated.array(), result.sent, energies, result.gain, result.thinned,
            bucket.workspace,
        )  # fmt: skip
    compressor, prediction = plan.scheme.compressor, plan.prediction
    kept = "as before, since some rank has no gradients of its own" if frozen else ""
    record = BucketRecord(
        bucket=bucket.index,
        parameters=len(bucket.members),
        numel=bucket.numel,
        compressor=compressor.get_config(),
        collective=plan.scheme.id,
        reason="; ".join(filter(None, (plan.reason, kept, result.note))),
        ratio=getattr(compressor, "ratio", None),
        ratio_reached=result.kept / bucket.numel,
        gain=result.gain if np.isfinite(result.gain) else None,
        phases_s={"compress": watch.own_s, "exchange": watch.waited_s, "decode": decode_s},
        predicted_s=prediction.seconds if prediction else None,
        predicted_phases_s=prediction.phases() if prediction else None,
        sent_bytes=watch.sent_bytes,
        wire_bytes=watch.wire_bytes,
        dense_wire_bytes=dense_ring_bytes(bucket.numel, group.size),
        rounds=watch.operations,
        layers=layers,
        code_error=result.code_error if result.code_error is None or np.isfinite(result.code_error) else None,
        energy=result.energy if np.isfinite(result.energy) else None,
    )
    own_s, once = watch.own_s + decode_s, watch.once_wire_bytes
    return Exchanged(plan, result, record, choosing_s, ready, start, end, own_s, survey, once, watch.spans)
