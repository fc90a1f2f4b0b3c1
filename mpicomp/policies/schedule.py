"""The ratio as a function of the step, and the warm-up before any policy: dense steps, or a falling ratio."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mpicomp.collectives import bind, fitting
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.measured_policy import Adaptive
from mpicomp.policies.policy import BucketOutcome, Plan, Policy, Shape, StepReport, UserSettings
from mpicomp.policies.ratio_levels import at_ratio, check_adaptable, ladder
from mpicomp.policies.static import Static
from mpicomp.policies.surveys import Survey
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_least, check_ratio

_MAX_LEVELS = 33  # ratios for which seconds are predicted

# Measured with top-k at 1 % (docs/policies.md). On `text-lstm` the training loss is 4.0 % above dense in steps 0 to 29
# and 3.4 % in the next 30 without a warm-up, 0.2 and 1.1 % with these. More of them end no nearer to dense, on `digits`
# further from it, and each takes the bytes of tens of steps at 1 %.
DENSE_STEPS = 20
_RAMP = "ramp:"
_RAMP_BEGIN = 0.25  # ratio of the first step of DGC's ramp, section 3.3 of its paper


@register
@dataclass(eq=False)
class Schedule(Adaptive):
    """A ratio that goes from one value to another in the first steps and then stays.

    It may fall, as in a warm-up, or rise. Ratios that top-k has for some layers stay. Undone steps do not count.

    With t the steps so far:

    - ``"linear"``: ``begin + (end - begin) * t / steps``.
    - ``"exponential"``: ``begin * (end / begin) ** (t / steps)``.
    - ``"step"``: ``stages`` ratios in geometric progression, the first one ``begin`` and the last one ``end``. All but
      the last take ``steps / (stages - 1)`` steps each. DGC's warm-up, 0.25, 0.0625, 0.015625, 0.004 for an epoch each
      and then 0.001, is ``begin=0.25, end=0.001, stages=5`` and the steps of four epochs, to the rounding of its
      numbers.

    Parameters
    ----------
    begin, end : float
        Ratios in (0, 1]; either may be the larger one.
    steps : int
        Length of the ramp, at least 1.
    shape : {"linear", "exponential", "step"}
        Of the ramp.
    stages : int
        Of ``"step"``, at least 2; the last one follows the ramp.

    Examples
    --------
    >>> warm_up = Schedule(begin=0.25, end=0.001, steps=400, shape="step", stages=5)
    >>> [round(warm_up.ratio(step), 4) for step in (0, 99, 100, 200, 300, 400, 5000)]
    [0.25, 0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    """

    id: ClassVar[str] = "schedule"
    paper: ClassVar[str] = "'step': the warm-up of DGC, Lin et al. 2018, arXiv 1712.01887"

    begin: float = 0.25
    end: float = 0.001
    steps: int = 1000
    shape: str = "exponential"
    stages: int = 5

    def check(self) -> None:
        check_ratio(f"{self.id}: begin", self.begin)
        check_ratio(f"{self.id}: end", self.end)
        check_choice(self.id, "shape", self.shape, ("linear", "exponential", "step"))
        check_least(self.id, "steps", self.steps)
        check_least(self.id, "stages", self.stages, 2)

    def check_compressor(self) -> None:
        problem = f"changes the ratio, which {self.compressor.id} does not have"
        check_adaptable(self.id, self.compressor, problem, layers=True)

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        self._steps_done = 0
        self._current: dict[int, tuple[float, Compressor]] = {}  # by bucket, the last ratio and its compressor

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self._current.clear()
        yield from super().start(shapes, transport)

    def ratio(self, step: int) -> float:
        """Return the ratio of a step."""
        if self.shape == "step":
            share = step * (self.stages - 1) // self.steps / (self.stages - 1)
        else:
            share = step / self.steps
        if share >= 1:
            return self.end
        if self.shape == "linear":
            return self.begin + share * (self.end - self.begin)
        ratio: float = self.begin * (self.end / self.begin) ** share
        return ratio

    def levels(self) -> list[Compressor]:
        least, most = sorted((self.begin, self.end))
        step = max(2**0.5, (most / least) ** (1 / (_MAX_LEVELS - 1)))
        return [at_ratio(self.compressor, ratio) for ratio in dict.fromkeys(ladder(least, most, step))]

    def choose(self, bucket: int) -> tuple[Compressor | None, str]:
        ratio = self.ratio(self._steps_done)
        current = self._current.get(bucket)
        if current is None or current[0] != ratio:
            shape = self._shapes[bucket]
            compressor = at_ratio(self.compressor, ratio).bind(shape.names, shape.sizes, shape.shapes)
            self._current[bucket] = current = ratio, compressor
        ends = "the end of the ramp" if ratio == self.end else f"step {self._steps_done} of the ramp"
        return current[1], f"ratio {ratio:.4g}, {ends}"

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._steps_done += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps_done}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        self._steps_done = int(state.get("steps", 0))
        super().load_state_dict(state, cost)


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
    settings, and for compressors that are dense, are as published, or that dense steps cannot replace.
    """
    if warmup is not None:
        steps, ramps = read_warmup(warmup)
        return f"{_RAMP}{steps}" if ramps else steps
    if compressor is None or collective != "auto" or policy is not None or feedback is not None:
        return 0
    plain = compressor.message != "dense" and compressor.can_fall_back_to_dense
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


@dataclass(eq=False)
class WarmUp(Policy):
    """Runs dense exchange or DGC's ramp of ratios in the first steps, and then another policy.

    The ramp has five ratios in geometric progression, from 0.25 to that of the compressor, which begins after the
    warm-up. Undone steps do not count. The policy that follows starts with the first step, and gets no report of the
    warm-up, which ends for all buckets in the same step.
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
        self.compressor, self.feedback = compressor, feedback = self.then.compressor, self.then.feedback
        self.bucket_bytes = self.then.bucket_bytes
        if not compressor.can_fall_back_to_dense:
            raise ConfigurationError(
                f"warmup: dense steps cannot take the place of those of {compressor.id}, which begins by itself, or "
                "delivers something else than a mean of gradients; leave warmup out"
            )
        if not self._is_ramp:
            self._first: Policy = Static()
            settings = replace(settings, compressor=Dense(), collective=_for_dense(settings.collective))
        elif compressor.selects_by_ratio:
            end = compressor.ratio  # type: ignore[attr-defined]
            self._first = Schedule(begin=max(_RAMP_BEGIN, end), end=end, steps=self._steps, shape="step")
            settings = replace(settings, compressor=compressor)
        else:
            raise ConfigurationError(
                f"warmup: a ramp changes the ratio, which {compressor.id} does not have; use warmup={self._steps}, "
                "for as many dense steps"
            )
        self._first.configure(replace(settings, feedback=feedback))
        self._planning = self._active

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

    def repeats(self) -> bool:
        return not self._warming and self.then.repeats()

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
    if collective == "auto":
        return collective
    try:
        bind(Dense(), collective)
    except IncompatiblePairError:
        return fitting(Dense())[0]
    return collective
