"""Steps from one exchange to the next, and bits of an element, by the predicted seconds to a loss."""

import math
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

_INTERVALS = 1, 2, 5, 10, 20, 40  # steps
_BITS = 1, 2, 4
_PENALTY_OF_A_BIT = 0.02  # share of more steps that training needs with one bit; with b bits a b-th of it
_STAY_RATIO = 0.998  # of the last choice's seconds, from which another is taken, so that noise changes nothing


@register
@dataclass(eq=False)
class Interval(Named):
    """Choose the steps between two exchanges of updates, and the bits of an element, by the seconds to a loss.

    A step takes the seconds of its computation and its share of an exchange, and training needs more steps to a loss
    the further exchanges are apart: of H steps and b bits the product ``(step + exchange_b / H) (1 + penalty)**log2(H)
    (1 + 0.02 / b)`` is the least. Candidates are the compressor's bits, more of them up to 4, and dense exchange.

    Parameters
    ----------
    penalty : float
        At least 0: share of more steps that training needs to a loss for each doubling of the steps between exchanges.
        It differs from task to task; docs/updates.md has those that were measured.
    """

    id: ClassVar[str] = "interval"
    resumes: ClassVar[bool] = False

    penalty: float = 0.1

    def __post_init__(self) -> None:
        self.chooses_steps = False  # set by the optimizer that makes `sync_every` steps before the next exchange
        super().__post_init__()

    def check(self) -> None:
        if not is_number(self.penalty) or not 0 <= self.penalty < math.inf:
            raise ConfigurationError(f"interval: penalty must be a finite number of at least 0, got {self.penalty!r}")

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
        tables = [(table, self._selector.seconds(bucket)) for bucket, table in enumerate(self._selector.tables)]
        penalties = [_PENALTY_OF_A_BIT / getattr(level, "bits", 1) for level in self.levels()]
        penalties += [0.0] * (tables[0][0].kept.size - len(penalties))  # dense
        seconds: dict[tuple[int, int], float] = {}
        for level, penalty in enumerate(penalties):
            exchange_s = sum(float(seconds_of[table.rows_of(level)].min()) for table, seconds_of in tables)
            for steps in _INTERVALS if self.chooses_steps else (1,):
                more = (1 + self.penalty) ** math.log2(steps) * (1 + penalty)
                seconds[steps, level] = (step_s + exchange_s / steps) * more
        best = min(seconds, key=seconds.__getitem__)
        if seconds[best] <= _STAY_RATIO * seconds[self._chosen]:
            self._chosen = best
        steps, level = self._chosen
        more = (1 + self.penalty) ** math.log2(steps) * (1 + penalties[level])
        self._reason = (
            f"{steps} local steps of {step_s:.2g} s, and {seconds[steps, level] / more - step_s:.2g} s of each for the "
            f"exchange; {more - 1:.0%} more steps to a loss are assumed"
        )
