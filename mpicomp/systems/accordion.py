"""Accordion: large ratios in critical regimes, where gradients change, small ones elsewhere.

**The paper** (Agarwal et al. 2021, arXiv 2010.16248). Each layer has two settings. After each period of epochs the norm
of its gradient is compared with that of the period before: where it has changed by a threshold, or the learning rate
has dropped, the layer is in a critical regime and gets the larger setting, else the smaller one.

Here a period is ``every`` steps, and its norm the mean over steps of the norm of the accumulated gradient of all ranks,
in place of the norm of an epoch's sum on rank 0. A step's norm arrives while the next one runs.
"""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors import Compressor
from mpicomp.cost import CostModel
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.measured_policy import Adaptive
from mpicomp.policies.policy import BucketOutcome, Shape, StepReport, UserSettings
from mpicomp.policies.ratio_levels import at_ratio, check_adaptable, check_ratios, ladder
from mpicomp.policies.surveys import SpectrumSurvey, Survey
from mpicomp.registry import register
from mpicomp.setting_checks import check_least, check_range

_STRIDE = 8  # a survey reads one group of elements in eight
_DROP = 0.5  # a learning rate that falls to this share has dropped; one lowered a little at every step has not


class NormSurvey:
    """Squared L2 norms of layers; of large layers those of a sample."""

    def __init__(self, stride: int = 1) -> None:
        self._spectra = SpectrumSurvey(stride)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        spectra = self._spectra.measure(accumulated, residual, sizes, step)
        return self._spectra.energies(spectra, sizes).astype(np.float32)


@register
@dataclass(eq=False)
class Accordion(Adaptive):
    """Two ratios: the larger one for parts of the model whose gradients change much, the smaller one for the others.

    A part is a layer with top-k, which is then selected by itself, and a bucket with every other compressor. It gets
    ``most`` in the first period, and where its norm differs from that of the period before by ``threshold`` of that or
    more, or if that was 0; else ``least``. When the learning rate drops to half of its highest value since the start or
    since the last such drop, a period begins in which every part gets ``most``.

    Parameters
    ----------
    least, most : float
        Ratios in (0, 1].
    every : int
        Steps of a period.
    threshold : float
        Relative change of the norm, above 0.
    """

    id: ClassVar[str] = "accordion"
    paper: ClassVar[str] = (
        "Accordion, Agarwal et al. 2021, arXiv 2010.16248; periods of steps in place of epochs, mean norm of gradients "
        "with feedback in place of the norm of their sum over an epoch, all ranks in place of rank 0"
    )

    least: float = 0.01
    most: float = 0.1
    every: int = 50
    threshold: float = 0.5

    def check(self) -> None:
        check_ratios(self.id, self.least, self.most)
        check_least(self.id, "every", self.every)
        check_range(self.id, "threshold", self.threshold, 0, 1e6, above=True)

    def check_compressor(self) -> None:
        self.by_layer = self.compressor.layer_setting == "ratio"
        check_adaptable(self.id, self.compressor, f"chooses between two ratios, and {self.compressor.id} has none")

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        self._survey = NormSurvey(_STRIDE)
        self._counted = 0  # steps of this period
        self._sums: dict[str, float] = {}  # of norms in this period, by part
        self._norms: dict[str, float] = {}  # means of the period before
        self._quiet: set[str] = set()  # parts that get the smaller ratio
        self._highest_lr: float | None = None
        self._current: dict[int, Compressor] = {}  # by bucket
        self._delivered: set[int] = set()  # steps that were not undone, whose report has not arrived

    def survey(self, bucket: int) -> Survey | None:
        return self._survey

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        # The state of parts follows their names; if these have changed, a period begins
        self._current.clear()
        yield from super().start(shapes, transport)
        if self._sums.keys() != {part for bucket in range(len(shapes)) for part in self._parts(bucket)}:
            self._begin_period()

    def levels(self) -> list[Compressor]:
        # With a ratio for each layer, a bucket's ratio may be anywhere between the two
        ratios = ladder(self.least, self.most) if self.by_layer else [self.least, self.most]
        return [at_ratio(self.compressor, ratio) for ratio in dict.fromkeys(ratios)]

    def choose(self, bucket: int) -> tuple[Compressor | None, str]:
        parts, current = self._parts(bucket), self._current.get(bucket)
        if current is None:
            shape, ratios = self._shapes[bucket], [self.least if part in self._quiet else self.most for part in parts]
            current = at_ratio(self.compressor, ratios[0])
            if self.by_layer:
                kept = sum(size * ratio for size, ratio in zip(shape.sizes, ratios, strict=True))
                layers = {glob.escape(part): ratio for part, ratio in zip(parts, ratios, strict=True)}
                current = replace(self.compressor, ratio=kept / shape.numel, layers=layers)  # type: ignore[call-arg]
                current = current.bind(shape.names, shape.sizes, shape.shapes)
            self._current[bucket] = current
        quiet = sum(part in self._quiet for part in parts)
        if not self.by_layer:
            return current, f"its gradient changes {'little' if quiet else 'much, or may'}"
        return current, f"gradients of {quiet} of {len(parts)} layers change little"

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._delivered.add(step)

    def on_telemetry(self, report: StepReport) -> None:
        super().on_telemetry(report)
        if report.lr is not None:
            dropped = self._highest_lr is not None and report.lr <= _DROP * self._highest_lr
            self._highest_lr = report.lr if dropped else max(report.lr, self._highest_lr or report.lr)
            if dropped:
                self._quiet = set()
                self._begin_period()
        delivered = report.step in self._delivered
        self._delivered = {step for step in self._delivered if step > report.step}
        if not delivered or len(report.surveys) < len(self._shapes):
            return
        norms: dict[str, float] = {}
        for bucket, surveys in report.surveys.items():
            energies = surveys.sum(axis=0, dtype=np.float64)
            squares = energies if self.by_layer else energies.sum(keepdims=True)
            norms |= zip(self._parts(bucket), np.sqrt(squares).tolist(), strict=True)
        if not np.isfinite(list(norms.values())).all():
            return
        self._counted += 1
        self._sums = {part: self._sums.get(part, 0.0) + norm for part, norm in norms.items()}
        if self._counted == self.every:
            before, self._norms = self._norms, {part: total / self._counted for part, total in self._sums.items()}
            self._quiet = {
                part
                for part, norm in self._norms.items()
                if before.get(part, 0.0) > 0 and abs(before[part] - norm) < self.threshold * before[part]
            }
            self._begin_period()

    def state_dict(self) -> dict[str, Any]:
        return {
            "looked": self._counted,
            "sums": dict(self._sums),
            "norms": dict(self._norms),
            "quiet": sorted(self._quiet),
            "highest_lr": self._highest_lr,
        }

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        super().load_state_dict(state, cost)
        self._counted, self._highest_lr = int(state.get("looked", 0)), state.get("highest_lr")
        self._sums, self._norms = dict(state.get("sums", {})), dict(state.get("norms", {}))
        self._quiet = set(state.get("quiet", []))
        self._current.clear()
        self._delivered.clear()

    def _parts(self, bucket: int) -> tuple[str, ...]:
        names = self._shapes[bucket].names
        return names if self.by_layer else names[:1]

    def _begin_period(self) -> None:
        self._counted, self._sums = 0, {}
        self._current.clear()
