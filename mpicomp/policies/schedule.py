"""The ratio as a function of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpicomp.compressors import Compressor
from mpicomp.cost import CostModel
from mpicomp.policies.adaptive import Adaptive
from mpicomp.policies.policy import BucketOutcome, Shape, UserSettings
from mpicomp.policies.ratio_levels import at_ratio, check_has_ratio, ladder
from mpicomp.registry import register
from mpicomp.rounds import Rounds
from mpicomp.setting_checks import check_choice, check_least, check_range, check_ratio
from mpicomp.transport.base import Transport

_SHAPES = ("linear", "exponential", "step", "varco")
_MAX_LEVELS = 33  # ratios for which seconds are predicted
_MAX_SLOPE = 1e6  # a ramp of one step, however long training is


@register
@dataclass(eq=False)
class Schedule(Adaptive):
    """A ratio that goes from one value to another in the first steps and then stays.

    It may fall, as in a warm-up, or rise. Only the ratio of the compressor changes; ratios that top-k has for some
    layers stay as they are. Steps that were undone do not count.

    With t the steps so far:

    - ``"linear"``: ``begin + (end - begin) * t / steps``.
    - ``"exponential"``: ``begin * (end / begin) ** (t / steps)``.
    - ``"step"``: ``stages`` ratios in geometric progression, the first one ``begin`` and the last one ``end``. All but
      the last take ``steps / (stages - 1)`` steps each. DGC's warm-up, 0.25, 0.0625, 0.015625, 0.004 for an epoch each
      and then 0.001, is ``begin=0.25, end=0.001, stages=5`` and the steps of four epochs, to the rounding of its
      numbers.
    - ``"varco"``: the factor ``1 / ratio`` is linear in the step, from ``1 / begin`` to ``1 / end``, which it reaches
      after ``(steps - 2) / slope`` steps: ``steps`` is then the length of the whole training.

    Parameters
    ----------
    begin, end : float
        Ratios in (0, 1]; either may be the larger one.
    steps : int
        Length of the ramp, at least 1; 3 with ``"varco"``.
    shape : {"linear", "exponential", "step", "varco"}
        Of the ramp.
    stages : int
        Of ``"step"``, at least 2; the last one is what follows the ramp.
    slope : float
        Of ``"varco"``, at least 1: how many times sooner than training the ramp ends.

    Examples
    --------
    >>> warm_up = Schedule(begin=0.25, end=0.001, steps=400, shape="step", stages=5)
    >>> [round(warm_up.ratio(step), 4) for step in (0, 99, 100, 200, 300, 400, 5000)]
    [0.25, 0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    >>> Schedule(begin=1 / 128, end=1 / 1.5, steps=300, shape="varco", slope=5).ratio(0)
    0.0078125
    """

    id: ClassVar[str] = "schedule"
    paper: ClassVar[str] = (
        "'step': the warm-up of DGC, Lin et al. 2018, arXiv 1712.01887; 'varco': VARCO, arXiv 2406.17611, by steps in "
        "place of epochs, for gradients in place of activations"
    )

    begin: float = 0.25
    end: float = 0.001
    steps: int = 1000
    shape: str = "exponential"
    stages: int = 5
    slope: float = 5.0

    def check(self) -> None:
        check_ratio(f"{self.id}: begin", self.begin)
        check_ratio(f"{self.id}: end", self.end)
        check_choice(self.id, "shape", self.shape, _SHAPES)
        check_least(self.id, "steps", self.steps, 3 if self.shape == "varco" else 1)
        check_least(self.id, "stages", self.stages, 2)
        check_range(self.id, "slope", self.slope, 1, _MAX_SLOPE)

    def check_compressor(self) -> None:
        check_has_ratio(self.id, self.compressor, f"changes the ratio, which {self.compressor.id} does not have")

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        self._steps_done = 0
        self._current: dict[int, tuple[float, Compressor]] = {}  # by bucket, the last ratio and its compressor

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self._current.clear()
        yield from super().start(shapes, transport)

    def ratio(self, step: int) -> float:
        """Return the ratio after so many steps."""
        if self.shape == "varco":
            share = self.slope * step / (self.steps - 2)
        elif self.shape == "step":
            share = step * (self.stages - 1) // self.steps / (self.stages - 1)
        else:
            share = step / self.steps
        if share >= 1:
            return self.end
        if self.shape == "linear":
            return self.begin + share * (self.end - self.begin)
        if self.shape == "varco":
            return 1 / (1 / self.begin + share * (1 / self.end - 1 / self.begin))
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
