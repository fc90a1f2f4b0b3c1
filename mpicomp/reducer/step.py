"""A step: a transaction over buckets, of which each is exchanged and then all are committed, or all undone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpicomp import kernels
from mpicomp.collectives.scheme import Scheme, cause_of
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.wire import Selection
from mpicomp.errors import MessageError, MpicompError
from mpicomp.gpu import HOST
from mpicomp.gpu.routes import run_on_device
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import Rounds, gather_rows
from mpicomp.mpi.transport import RoundLog
from mpicomp.policies import Plan, Policy
from mpicomp.policies.surveys import Survey
from mpicomp.reducer import trace
from mpicomp.reducer.agreement import Checks
from mpicomp.reducer.bucket import Bucket
from mpicomp.reducer.layout import Inputs, Layout
from mpicomp.reducer.record import BucketExchange, StepRecord

_ACTIVITY = "step %d, bucket %d ('%s' ...) by %s"


class Step:
    """One step on one rank. Until `commit` it changes nothing but buckets that are exchanged, which `undo` restores.

    Parameters
    ----------
    number : int
        Of the step, the same on all ranks.
    layout : Layout
        The buckets.
    transport : Transport
        Runs the rounds.
    seed : int
        Of random choices.
    scale : float
        Factor of the gradients.
    checks : Checks
        The caller's checks of this step; where they are frozen, plans are those of the step before.
    log : list of RoundLog
        Written by the transport; rounds that no bucket has taken are overhead of the step.
    previous : StepRecord, optional
        Of the last step, whose arrays are released before other plans run.
    """

    inputs = Inputs({}, ())
    plans: Sequence[Plan] = ()
    surveys: Sequence[Survey | None] = ()
    """By bucket; none where no bucket is surveyed."""
    stale = False
    """Whether some rank has asked, the same on all ranks."""
    nonfinite: Sequence[BucketExchange] = ()
    """Exchanges in which some rank had NaN or infinity."""
    damaged: MessageError | None = None
    """The message that this rank could not read."""
    argument_problem: MpicompError | None = None
    """Error in another argument than the arrays."""
    repeats = False
    """Whether it runs the plans of the last step, and the policy learns nothing from it."""
    has_overflowed = False
    """Whether finite gradients have become infinite in the exchange."""

    def __init__(
        self,
        number: int,
        layout: Layout,
        transport: Transport,
        seed: int,
        scale: float,
        checks: Checks,
        log: list[RoundLog],
        previous: StepRecord | None = None,
    ) -> None:
        self.scale, self.log = scale, log
        self.checks, self.frozen = checks, checks.frozen
        self.factor = scale  # that also clips the gradients of this rank
        self.record = StepRecord(number)
        self.done: list[BucketExchange] = []
        self._layout, self._transport, self._seed, self._previous = layout, transport, seed, previous
        self._memories: list[tuple[Bucket, dict[str, Any]]] = []
        if layout.stages:
            layout.begin_step()

    def choose(self, policy: Policy, previous: Sequence[Plan]) -> None:
        """Let the policy choose each bucket's plan and survey; a frozen step keeps the previous plans."""
        numbers = range(len(self._layout.buckets))
        self.plans = previous if self.frozen and previous else list(map(policy.plan, numbers))
        self.surveys = () if self.frozen else list(map(policy.survey, numbers))

    def exchange(
        self, bucket: Bucket, given: Mapping[str, Any] | None, ready: float, log: list[RoundLog]
    ) -> Rounds[None]:
        """Exchange a bucket, ready at a time of the timer, by its plan. As rounds.

        ``given`` has its gradients; None asks all ranks to agree. The transport adds the rounds to ``log``, from which
        the bucket takes them.
        """
        plan = self.plans[bucket.index]
        survey = self.surveys[bucket.index] if self.surveys else None
        transport, scheme = self._transport, plan.scheme
        group, holds_gradients = transport.group, bucket.holds_gradients
        self._memories.append((bucket, _copied(bucket.memory) if bucket.memory else {}))
        gradients: Sequence[Any] | None = None
        if given is not None and self.damaged is None:  # the others receive that it is
            gradients = list(map(given.__getitem__, bucket.names))
            if not self._layout.describer.on_host:
                gradients = self._layout.inputs_of(bucket, gradients)
        transport.activity.purpose = _ACTIVITY, (self.record.step, bucket.index, bucket.names[0], scheme.id)
        may_overwrite = scheme.overwrites or not holds_gradients
        if may_overwrite and holds_gradients:  # all ranks have to hold them there before they are overwritten
            holds = gradients is not None and bucket.holds(gradients)
            may_overwrite = bool((yield from gather_rows(np.uint8(holds), group)).all())
        first = len(log)
        done = BucketExchange(bucket, plan, ready, transport.timer(), self.frozen, group)
        accumulated = bucket.accumulate(gradients, self.factor)
        accumulated.may_be_overwritten = may_overwrite
        if survey is not None and gradients is not None:  # before the exchange, which may overwrite the sum
            self._measure(bucket, accumulated, survey, done)
        last = bucket.last
        if scheme is not last.scheme or may_overwrite is not last.may_overwrite:
            self._release_buffers()
            bucket.release()
            last.scheme, last.may_overwrite = scheme, may_overwrite
        context = last.context
        if context is None or context.group is not group:
            last.context = context = Context(group, self.record.step, bucket.index, self._seed, {}, bucket.workspace)
        context.step, context.memory = self.record.step, bucket.memory
        exchange = scheme.exchange(accumulated, context)
        if bucket.device is not HOST:
            compile_ahead(bucket, scheme)
            exchange = run_on_device(bucket.device, exchange, self._layout.routes)
        if trace.markers:
            exchange = trace.marked(exchange)
        try:
            result = yield from exchange
        except MessageError as error:
            self.damaged, self.stale = self.damaged or cause_of(error), True
            return
        done.result, done.end, done.log = result, transport.timer(), log[first:]
        del log[first:]
        if accumulated.holds == "sum" and not isinstance(result.sent, Selection):
            with bucket.device.active():
                bucket.settle(result)
        self.damaged = self.damaged or result.problem
        if result.stale:
            self.stale, done.survey = True, None
        if result.nonfinite:
            self.nonfinite = [*self.nonfinite, done]
        self.done.append(done)

    def _measure(self, bucket: Bucket, accumulated: Accumulated, survey: Survey, done: BucketExchange) -> None:
        timer = self._transport.timer
        with bucket.device.active():
            array, begin = accumulated.array(), timer()
            done.survey = survey.measure(array, accumulated.residual, bucket.sizes, self.record.step)
        seconds = timer() - begin
        self.record.choosing_s += seconds
        done.start += seconds

    def _release_buffers(self) -> None:
        for entry in self.log:
            entry.task = entry.task.shape()
        for done in self.done:
            done.release_buffers()
        if self._previous is not None:
            self._previous.release_buffers()

    def commit(self, finite: bool, skip: bool, unused: Collection[str]) -> dict[str, Any]:
        """Keep residuals and return the means: of all arrays but ``unused`` ones; zeros if the step is skipped.

        Without ``skip`` elements that are not ``finite`` stay out of residuals.
        """
        layout, timer, gradients = self._layout, self._transport.timer, self.inputs.gradients
        parts: list[dict[str, Any]] = []
        for bucket, done in zip(layout.buckets, self.done, strict=True):
            begin = timer()
            if bucket.device is HOST:
                mean = bucket.skip(done.result) if skip else bucket.commit(done.result, finite)
            else:
                with bucket.device.active():
                    mean = bucket.skip(done.result) if skip else bucket.commit(done.result, finite)
            parts.append(layout.unflatten(bucket, mean, gradients, unused))
            done.commit_s = timer() - begin
        if layout.empty:
            parts.append(layout.unflatten_empty(gradients, unused))
        elif len(parts) == 1 and self.inputs.members is layout.members:
            return parts[0]  # in the order of the gradients
        means = {name: mean for part in parts for name, mean in part.items()}
        return {name: means[name] for name in gradients if name in means}

    def undo(self) -> None:
        """Restore the memories of compressors and collectives, and gradients, to those before the step."""
        for bucket, memory in reversed(self._memories):
            bucket.memory = memory
            bucket.undo()
        self._memories.clear()

    def begin_again(self) -> None:
        """Undo the exchanges so far, whose rounds become overhead.

        Where gradients were overwritten all ranks took part, so means replace them.
        """
        replaced = set()
        for done in self.done:
            self.log += done.log
            if done.bucket.has_lost_gradients and done.result.problem is None:
                done.bucket.replace_gradients(done.result)
                replaced.add(id(done.bucket))
        self._memories = [(bucket, memory) for bucket, memory in self._memories if id(bucket) not in replaced]
        self.undo()
        self.done.clear()
        self.nonfinite, self.stale, self.repeats = (), False, False


def compile_ahead(bucket: Bucket, scheme: Scheme[Any]) -> None:
    """Begin to compile the kernels of a scheme for the bucket's GPU, once."""
    sources = scheme.compressor.gpu_sources
    compile_sources = kernels.of(bucket.gradient(bucket.names[0])).compile_ahead
    with bucket.device.active():
        bucket.workspace.made(("compiled", sources), lambda: compile_sources(sources, bucket.dtype))


def _copied(memory: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a memory: its values are replaced, never written to, but for memories in it."""
    return {key: _copied(value) if type(value) is dict else value for key, value in memory.items()}
