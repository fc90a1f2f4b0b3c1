"""Steps from one exchange to the next, and bits of an element, by the share of time that exchanges take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mpicomp.compressors import Compressor
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.measured_policy import Named
from mpicomp.policies.plan_selector import PlanSelector
from mpicomp.policies.policy import BucketOutcome, Plan, StepReport, UserSettings
from mpicomp.registry import register
from mpicomp.setting_checks import is_number

_INTERVALS = 1, 2, 5, 10, 20, 40  # steps; their costs are in docs/updates.md
_BITS = 1, 2, 4
_STAY_RATIO = 1.2  # of the share that the last choice may take, so that noise in seconds changes nothing


@register
@dataclass(eq=False)
class Interval(Named):
    """Choose the fewest steps between two exchanges of updates that leave an exchange a small share of them.

    The harm of steps between exchanges differs from task to task, and is known after training only. So their number is
    the least of which the compressor's exchange takes at most ``share``, and the exchange gets as many bits as fit in
    that: the compressor's, 2, 4, or dense.

    Parameters
    ----------
    share : float
        In (0, 1]: seconds of an exchange over those of the steps before it. docs/updates.md has the reason for 0.25.
    """

    id: ClassVar[str] = "interval"
    resumes: ClassVar[bool] = False

    share: float = 0.25

    def __post_init__(self) -> None:
        self.chooses_steps = False  # set by the optimizer that makes `sync_every` steps before the next exchange
        super().__post_init__()

    def check(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ConfigurationError(f"interval: share must be in (0, 1], got {self.share!r}")

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        self._selector = PlanSelector(self.id, self.feedback, settings.cost)
        self._chosen = 1, 0  # steps before the next exchange, and the level of that exchange
        self._reason = "no step was timed yet"
        self._is_due = False

    @property
    def sync_every(self) -> int:
        """Steps until the next exchange, the same on all ranks."""
        return self._chosen[0]

    def levels(self) -> list[Compressor]:
        # The same compressor with more bits where it has bits
        bits = getattr(self.compressor, "bits", None)
        if bits is None or getattr(self.compressor, "layers", None):
            return [self.compressor]
        return [self.compressor] + [replace(self.compressor, bits=more) for more in _BITS if more > bits]  # type: ignore[call-arg]

    def refresh(self, transport: Transport) -> Rounds[None] | tuple[()]:
        if self._is_due:
            self._choose()
        return super().refresh(transport)

    def plan(self, bucket: int) -> Plan:
        table = self._selector.tables[bucket]
        return self._selector.plan(bucket, table.rows_of(self._chosen[1]), self._reason)

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        if self._selector.measured:
            self.step_times.steps_after[step] = self.sync_every

    def on_telemetry(self, report: StepReport) -> None:
        self._is_due |= self._learn(report)

    def state_dict(self) -> dict[str, Any]:
        return {"sync_every": self.sync_every, "level": self._chosen[1]}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        choices = _INTERVALS if self.chooses_steps else (1,)
        if state.get("sync_every") in choices and state.get("level") in range(len(self.levels()) + 1):
            self._chosen = int(state["sync_every"]), int(state["level"])
        super().load_state_dict(state, cost)

    def _choose(self) -> None:
        self._is_due = False
        step_s = self.step_times.compute_s
        if not step_s:
            return
        choices = _INTERVALS if self.chooses_steps else (1,)
        tables = [(table, self._selector.seconds(bucket)) for bucket, table in enumerate(self._selector.tables)]
        levels = range(tables[0][0].kept.size)
        exchange_s = [sum(float(seconds[table.rows_of(level)].min()) for table, seconds in tables) for level in levels]
        fits = [
            (steps, level)
            for steps in choices
            for level in levels
            if exchange_s[level] <= self.share * steps * step_s * (_STAY_RATIO if (steps, level) == self._chosen else 1)
        ]
        if fits:
            steps = fits[0][0]
            self._chosen = max(choice for choice in fits if choice[0] == steps)
        else:
            self._chosen = choices[-1], min(levels, key=exchange_s.__getitem__)
        steps, level = self._chosen
        share = exchange_s[level] / (steps * step_s)
        self._reason = (
            f"{steps} local steps of {step_s:.2g} s, of which an exchange takes {share:.0%}, "
            f"{'at most' if fits else 'and should take'} {self.share:.0%}"
        )
