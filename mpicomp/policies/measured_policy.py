"""Base classes of policies that predict seconds: of a named compressor, and of settings chosen at every step."""

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from mpicomp.collectives import bind, fitting
from mpicomp.compressors import Compressor, Dense, get_compressor
from mpicomp.cost import CostModel
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.plan_selector import Ladder, PlanSelector, collectives_for
from mpicomp.policies.policy import Plan, Policy, Shape, StepReport, UserSettings, feedback_of, model_of
from mpicomp.policies.ratio_levels import default_compressor

_COMPUTE_STEPS = 15  # whose median is the time outside of exchanges


class StepTimes:
    """Seconds of a step outside of exchanges, by telemetry of the slowest rank."""

    def __init__(self) -> None:
        self.steps_after: dict[int, int] = {}  # local steps after an exchange, by its number, where not 1
        self.clear()

    def clear(self) -> None:
        """Forget all times, for new buckets."""
        self._compute_s: deque[float] = deque(maxlen=_COMPUTE_STEPS)
        self._last: tuple[int, float] | None = None  # exchange, and when its last bucket was ready

    def observe(self, report: StepReport) -> None:
        ready, end = float(report.latest[-1, 3]), float(report.latest[-1, 1])
        if self._last is not None and report.step > self._last[0]:
            last_step, last_ready = self._last
            compute_s = (ready - last_ready) - (report.step - last_step) * (end - ready)
            steps = sum(self.steps_after.pop(exchange, 1) for exchange in range(last_step, report.step))
            self._compute_s.append(compute_s / steps)
        self._last = report.step, ready

    @property
    def compute_s(self) -> float:
        """The median outside of exchanges, or 0 before any are known."""
        return max(0.0, median(self._compute_s or [0.0]))


@dataclass(eq=False)
class MeasuredPolicy(Policy):
    """Base class of policies whose plans a `PlanSelector` chooses by predicted seconds."""

    def __post_init__(self) -> None:
        self._selector: PlanSelector
        self.step_times = StepTimes()
        super().__post_init__()

    @property
    def cost(self) -> CostModel | None:
        return self._selector.cost

    @property
    def wants_telemetry(self) -> bool:
        return self._selector.wants_telemetry

    def refresh(self, transport: Transport) -> Rounds[None] | tuple[()]:
        return self._selector.refresh(transport)  # type: ignore[return-value]  # the step ignores the value

    def on_telemetry(self, report: StepReport) -> None:
        self._learn(report)

    def _learn(self, report: StepReport) -> bool:
        learned = self._selector.on_telemetry(report)
        if learned:
            self.step_times.observe(report)
        return learned

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        self._selector.load_cost(cost)


@dataclass(eq=False)
class Named(MeasuredPolicy):
    """Base class of policies that run the compressor that the user named, dense without one.

    The collective ``"auto"`` is the one of least predicted time among those that deliver all that every rank has
    selected, and dense ones if these may replace the compressor. Others deliver less than the compressor promises,
    which seconds do not show: they run if they are named.
    """

    def levels(self) -> list[Compressor]:
        """Return the settings of the compressor that may run, ascending by bytes."""
        return [self.compressor]

    def configure(self, settings: UserSettings) -> None:
        self.compressor = settings.compressor or Dense()
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._pinned = settings.pinned
        # A pair that does not fit, or needs another package, raises here: later a single rank might fail.
        bind(self.compressor, self._pinned or fitting(self.compressor)[0])

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self.step_times.clear()
        ladders: list[Ladder] = []
        model, levels = model_of(shapes), self.levels()
        for shape in shapes:
            ladder: Ladder = []
            for level in levels:
                bound = level.bind(shape.names, shape.sizes, shape.shapes, model=model)
                names = [self._pinned] if self._pinned else collectives_for(bound, transport.group, complete=True)
                ladder.append((bound, names))
            if self._pinned is None and self.compressor != Dense() and self.compressor.can_fall_back_to_dense:
                ladder.append((Dense(), collectives_for(Dense(), transport.group)))
            ladders.append(ladder)
        yield from self._selector.start(ladders, shapes, transport)


@dataclass(eq=False)
class Adaptive(MeasuredPolicy):
    """Chooses a setting of one compressor, top-k unless the user names one, for every bucket and step, or dense.

    The collective ``"auto"`` is the one of least predicted time among those that deliver all that every rank has
    selected, and dense ones, so that an exchange that is faster without compression is dense.

    To add a policy, derive from this class and define `levels` and `choose`.
    """

    def __post_init__(self) -> None:
        self.by_layer = False
        """Whether `choose` sets layers of a bucket separately, which not every collective carries."""
        self.may_be_dense = True
        """Whether a bucket is dense if that is predicted to be faster than the result of `choose`."""
        super().__post_init__()

    @abstractmethod
    def levels(self) -> list[Compressor]:
        """Return settings of the compressor, ascending by bytes, for which seconds are predicted.

        A result of `choose` is predicted to take as long as the nearest of them.
        """

    @abstractmethod
    def choose(self, bucket: int) -> tuple[Compressor | None, str]:
        """Return the compressor of a bucket in this step, or None for dense, and the reason. Called once a step."""

    def configure(self, settings: UserSettings) -> None:
        self.compressor = settings.compressor or default_compressor()
        self.check_compressor()
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._pinned = settings.pinned
        if self._pinned is not None:
            bind(self._as_chosen(self.compressor), self._pinned)  # raises if it does not fit
        self._selector = PlanSelector(self.id, self.feedback, settings.cost, self._pinned is not None)
        self._shapes: list[Shape] = []

    def check_compressor(self) -> None:
        """Raise `ConfigurationError` if this policy cannot use the compressor."""

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self._shapes = list(shapes)
        ladders: list[Ladder] = []
        for shape in shapes:
            ladder: Ladder = []
            for level in self.levels():
                bound = level.bind(shape.names, shape.sizes, shape.shapes)
                chosen = self._as_chosen(bound)
                names = [self._pinned] if self._pinned else collectives_for(chosen, transport.group, complete=True)
                ladder.append((bound, names))
            ladders.append([*ladder, (Dense(), collectives_for(Dense(), transport.group))])
        yield from self._selector.start(ladders, shapes, transport)

    def _as_chosen(self, level: Compressor) -> Compressor:
        setting = level.layer_setting
        if not self.by_layer or setting is None:
            return level
        config = level.get_config()
        return get_compressor(config | {"layers": {"*": config[setting]}})

    def plan(self, bucket: int) -> Plan:
        compressor, reason = self.choose(bucket)
        table = self._selector.tables[bucket]
        among = table.rows_of(table.dense)
        if compressor is not None:
            rows = table.rows_of(table.level(compressor))
            among = np.concatenate((rows, among)) if self.may_be_dense and not self._pinned else rows
        return self._selector.plan(bucket, among, reason, compressor)
