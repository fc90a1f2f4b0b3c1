"""The warm-up: what comes before a policy in the first steps of a run, dense exchange or a falling ratio."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mpicomp.collectives import bind, fitting
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.policies.policy import BucketOutcome, Plan, Policy, Shape, StepReport, UserSettings
from mpicomp.policies.schedule import Schedule
from mpicomp.policies.static import Static
from mpicomp.policies.surveys import Survey
from mpicomp.rounds import Rounds
from mpicomp.transport.base import Transport

# Measured with top-k at 1 % (docs/policies.md). On `text-lstm` the training loss is 4.0 % above dense in steps 0 to 29
# and 3.4 % in the next 30 without a warm-up, 0.2 and 1.1 % with these. More of them end no nearer to dense, on `digits`
# further from it, and each takes as many bytes as tens of steps at 1 %.
DENSE_STEPS = 20
_RAMP = "ramp:"
_RAMP_BEGIN = 0.25  # ratio of the first step of DGC's ramp, section 3.3 of its paper


def read_warmup(warmup: int | str) -> tuple[int, bool]:
    """Return the number of steps of a warm-up, and whether it is a ramp of ratios.

    Raises
    ------
    ConfigurationError
        Where it is neither an integer of at least 0, nor ``"ramp:N"`` with N of at least 1.

    Examples
    --------
    >>> read_warmup(100), read_warmup("ramp:100")
    ((100, False), (100, True))
    """
    ramps = isinstance(warmup, str) and warmup.startswith(_RAMP)
    try:
        steps = int(warmup.removeprefix(_RAMP)) if isinstance(warmup, str) else operator.index(warmup)
    except (TypeError, ValueError):
        steps = -1
    if steps < ramps or isinstance(warmup, bool):
        raise ConfigurationError(
            "warmup: must be a number of dense steps of at least 0, or 'ramp:N' for N steps, at least 1, of a falling "
            f"ratio, got {warmup!r}"
        )
    return steps, ramps


def choose_warmup(
    warmup: int | str | None,
    compressor: Compressor | None,
    collective: str = "auto",
    policy: Any = None,
    feedback: bool | None = None,
) -> int | str:
    """Return a warm-up as it was named; where it was not, the default for what else was.

    With a compressor and nothing else that is `DENSE_STEPS`: what no user has weighed must train well. It is 0 where
    more is named, and for compressors that are dense, begin in a way of their own, are as their papers have them, or
    that dense steps cannot replace.

    Parameters
    ----------
    warmup : int, str or None
        What was named, see `read_warmup`; None for nothing.
    compressor, collective, policy, feedback
        What else was named, see `mpicomp.Reducer`.

    Examples
    --------
    >>> from mpicomp.compressors import TopK
    >>> choose_warmup(None, TopK()), choose_warmup(None, TopK(), "allgather"), choose_warmup(3, TopK(), "allgather")
    (20, 0, 3)
    """
    if warmup is not None:
        steps, ramps = read_warmup(warmup)
        return f"{_RAMP}{steps}" if ramps else steps
    if compressor is None or collective != "auto" or policy is not None or feedback is not None:
        return 0
    plain = compressor.message != "dense" and compressor.can_fall_back_to_dense and not _begins_otherwise(compressor)
    return DENSE_STEPS if plain and not getattr(compressor, "published", False) else 0


def _begins_otherwise(compressor: Compressor) -> bool:
    """Return whether a compressor has a warm-up of its own."""
    return compressor.bind([], [], warm_up=False).get_config() != compressor.get_config()


@dataclass(eq=False)
class WarmUp(Policy):
    """Runs another policy in the first steps, dense exchange or DGC's ramp of ratios, and then the one that was named.

    Steps that were undone do not count. The policy that follows takes up buckets at once, and hears of no step of the
    warm-up. The warm-up ends for all buckets in the same step, later ones among them.

    Parameters
    ----------
    then : Policy
        The policy that follows.
    warmup : int or str
        See `read_warmup`; at least one step. The ramp has five ratios in geometric progression, from 0.25 to that of
        the compressor; the last one begins when the warm-up has ended.
    """

    id: ClassVar[str] = "warmup"

    then: Policy
    warmup: int | str

    def check(self) -> None:
        """See `Policy.check`."""
        self.id = self.then.id  # type: ignore[misc]  # messages are about the policy that was named
        self._steps, self._ramps = read_warmup(self.warmup)
        self._done = 0
        self._last = float("inf")  # number of the last step of the warm-up, once that is over

    def configure(self, settings: UserSettings) -> None:
        """See `Policy.configure`.

        Raises
        ------
        ConfigurationError
            For a compressor that has a warm-up of its own, that dense steps cannot replace, or, with a ramp, that has
            no ratio.
        """
        self.then.configure(settings)
        self.compressor = compressor = self.then.compressor
        self.feedback = self.then.feedback
        if _begins_otherwise(compressor):
            raise ConfigurationError(
                f"warmup: {compressor!r} begins with a warm-up of its own; leave one of the two out"
            )
        if not compressor.can_fall_back_to_dense:
            raise ConfigurationError(
                f"warmup: dense steps cannot take the place of those of {compressor.id}, which delivers something else "
                "than a mean of gradients or has its momentum in the residual; leave warmup out"
            )
        if self._ramps:
            self._first: Policy = self._ramp(compressor)
            self._first.configure(replace(settings, compressor=compressor, feedback=self.feedback))
        else:
            self._first = Static()
            collective = _for_dense(settings.collective)
            self._first.configure(replace(settings, compressor=Dense(), collective=collective, feedback=self.feedback))
        self._planning = self._active

    def _ramp(self, compressor: Compressor) -> Policy:
        if not compressor.selects_by_ratio:
            raise ConfigurationError(
                f"warmup: a ramp changes the ratio, which {compressor.id} does not have; use warmup={self._steps}, "
                "which is so many dense steps"
            )
        end = compressor.ratio  # type: ignore[attr-defined]
        return Schedule(begin=max(_RAMP_BEGIN, end), end=end, steps=self._steps, shape="step")

    @property
    def _warming(self) -> bool:
        return self._done < self._steps

    @property
    def _active(self) -> Policy:
        return self._first if self._warming else self.then

    @property
    def cost(self) -> CostModel | None:
        """See `Policy.cost`: that of the policy that follows, which has measured first."""
        return self.then.cost

    @property
    def local_steps(self) -> int:
        """See `Policy.local_steps`."""
        return self._active.local_steps

    @property
    def bucket_bytes(self) -> int | None:
        """See `Policy.bucket_bytes`."""
        return self.then.bucket_bytes

    @property
    def wants_telemetry(self) -> bool:
        """See `Policy.wants_telemetry`."""
        return self._planning.wants_telemetry

    def survey(self, bucket: int) -> Survey | None:
        """See `Policy.survey`."""
        return self._planning.survey(bucket)

    def bucket_limit(self, nbytes: int, transport: Transport) -> Rounds[int | None]:
        """See `Policy.bucket_limit`."""
        return (yield from self.then.bucket_limit(nbytes, transport))

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        """See `Policy.start`."""
        yield from self.then.start(shapes, transport)
        if self._warming:
            self._first.load_state_dict(self._first.state_dict(), self.then.cost)  # so that nothing is measured twice
            yield from self._first.start(shapes, transport)

    def refresh(self, transport: Transport) -> Rounds[None]:
        """See `Policy.refresh`."""
        yield from self._active.refresh(transport)

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        self._planning = self._active
        plan = self._planning.plan(bucket)
        if not self._warming:
            return plan
        return replace(plan, reason=f"warm-up: step {self._done + 1} of {self._steps}; {plan.reason}")

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        """See `Policy.on_step_end`."""
        self._active.on_step_end(step, outcomes)
        if self._warming:
            self._done += 1
            self._last = float("inf") if self._warming else step

    def on_telemetry(self, report: StepReport) -> None:
        """See `Policy.on_telemetry`: the report comes a step later, to the policy that planned the step."""
        (self._first if report.step <= self._last else self.then).on_telemetry(report)

    def state_dict(self) -> dict[str, Any]:
        """See `Policy.state_dict`: that of the policy that follows, and under ``"warmup"`` that of the warm-up."""
        return self.then.state_dict() | {"warmup": self._first.state_dict() | {"done": self._done}}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """See `Policy.load_state_dict`: a run that had no warm-up has none after it is resumed."""
        own = state.get("warmup", {"done": self._steps})
        self._done = int(own["done"])
        self._last = float("inf") if self._warming else -1
        self._first.load_state_dict(own, cost)
        self.then.load_state_dict({key: value for key, value in state.items() if key != "warmup"}, cost)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the policy that was named; the warm-up is a setting beside it."""
        return self.then.get_config()


def _for_dense(collective: str) -> str:
    """Return the collective of dense steps: the one that was named where it carries them, else MPI's own."""
    if collective == "auto":
        return collective
    try:
        bind(Dense(), collective)
    except IncompatiblePairError:
        return fitting(Dense())[0]
    return collective
