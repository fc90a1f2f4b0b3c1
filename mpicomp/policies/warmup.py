"""The warm-up before a policy: dense exchange or a falling ratio in the first steps of a run."""

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
# further from it, and each takes the bytes of tens of steps at 1 %.
DENSE_STEPS = 20
_RAMP = "ramp:"
_RAMP_BEGIN = 0.25  # ratio of the first step of DGC's ramp, section 3.3 of its paper


def read_warmup(warmup: int | str) -> tuple[int, bool]:
    """Return the number of steps of a warm-up, and whether it is a ramp of ratios: ``"ramp:N"``."""
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
    """Return the user's warm-up, or the default for the other settings of `mpicomp.Reducer`.

    The default is `DENSE_STEPS` for a compressor without other settings: it must train well. It is 0 with further
    settings, and for compressors that are dense, have their own warm-up, are as published, or that dense steps cannot
    replace.
    """
    if warmup is not None:
        steps, ramps = read_warmup(warmup)
        return f"{_RAMP}{steps}" if ramps else steps
    if compressor is None or collective != "auto" or policy is not None or feedback is not None:
        return 0
    plain = compressor.message != "dense" and compressor.can_fall_back_to_dense and not _has_warmup(compressor)
    return DENSE_STEPS if plain and not getattr(compressor, "published", False) else 0


def with_warmup(policy: Any, warmup: int | str | None) -> Any:
    """Return a policy with a warm-up before it, as `mpicomp.Reducer` takes it; unchanged if the warm-up is None."""
    if warmup is None:
        return policy
    if isinstance(policy, Policy):
        policy.warmup = warmup
        return policy
    config = {"id": policy} if isinstance(policy, str) else dict(policy or {})
    return config | {"warmup": warmup}


def _has_warmup(compressor: Compressor) -> bool:
    """Return whether a compressor has its own warm-up."""
    return compressor.bind([], [], warm_up=False).get_config() != compressor.get_config()


@dataclass(eq=False)
class WarmUp(Policy):
    """Runs dense exchange or DGC's ramp of ratios in the first steps, and then another policy.

    The ramp has five ratios in geometric progression, from 0.25 to that of the compressor, which begins after the
    warm-up. Steps that were undone do not count. The policy that follows starts with the first step, and gets no report
    of the warm-up, which ends for all buckets in the same step.
    """

    id: ClassVar[str] = "warmup"

    then: Policy
    length: int | str  # see `read_warmup`; at least one step

    def check(self) -> None:
        self.id = self.then.id  # type: ignore[misc]  # messages are about the policy that follows
        self._steps, self._is_ramp = read_warmup(self.length)
        self._done = 0
        self._last_step = float("inf")  # the last step of the warm-up, once it is over

    def configure(self, settings: UserSettings) -> None:
        self.then.configure(settings)
        self.compressor = compressor = self.then.compressor
        self.feedback = self.then.feedback
        if _has_warmup(compressor):
            raise ConfigurationError(
                f"warmup: {compressor!r} begins with a warm-up of its own; leave one of the two out"
            )
        if not compressor.can_fall_back_to_dense:
            raise ConfigurationError(
                f"warmup: dense steps cannot take the place of those of {compressor.id}, which delivers something else "
                "than a mean of gradients or has its momentum in the residual; leave warmup out"
            )
        if self._is_ramp:
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
        return self.then.cost

    @property
    def bucket_bytes(self) -> int | None:
        return self.then.bucket_bytes

    @property
    def wants_telemetry(self) -> bool:
        return self._planning.wants_telemetry

    def survey(self, bucket: int) -> Survey | None:
        return self._planning.survey(bucket)

    def bucket_limit(self, nbytes: int, transport: Transport) -> Rounds[int | None]:
        return (yield from self.then.bucket_limit(nbytes, transport))

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        yield from self.then.start(shapes, transport)
        if self._warming:
            self._first.load_state_dict(self._first.state_dict(), self.then.cost)  # measure nothing twice
            yield from self._first.start(shapes, transport)

    def refresh(self, transport: Transport) -> Rounds[None] | tuple[()]:
        return self._active.refresh(transport)

    def plan(self, bucket: int) -> Plan:
        self._planning = self._active
        plan = self._planning.plan(bucket)
        if not self._warming:
            return plan
        return replace(plan, reason=f"warm-up: step {self._done + 1} of {self._steps}; {plan.reason}")

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._active.on_step_end(step, outcomes)
        if self._warming:
            self._done += 1
            self._last_step = float("inf") if self._warming else step

    def on_telemetry(self, report: StepReport) -> None:
        (self._first if report.step <= self._last_step else self.then).on_telemetry(report)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the policy that follows, with that of the warm-up under ``"warmup"``."""
        return self.then.state_dict() | {"warmup": self._first.state_dict() | {"done": self._done}}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        saved = state.get("warmup", {"done": self._steps})
        self._done = int(saved["done"])
        self._last_step = float("inf") if self._warming else -1
        self._first.load_state_dict(saved, cost)
        self.then.load_state_dict({key: value for key, value in state.items() if key != "warmup"}, cost)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the policy that follows: the warm-up is another setting."""
        return self.then.get_config()


def _for_dense(collective: str) -> str:
    """Return the collective of dense steps: the user's if it carries them, else MPI's."""
    if collective == "auto":
        return collective
    try:
        bind(Dense(), collective)
    except IncompatiblePairError:
        return fitting(Dense())[0]
    return collective
