"""A warning that the compressor the user named makes training fall behind, with one that would not."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.collectives import Scheme
from mpicomp.compressors import Compressor, Quantiser
from mpicomp.policies.convergence_penalty import ElementStatistics, ElementSurvey, delay_penalty
from mpicomp.policies.policy import BucketOutcome, Shape, StepReport
from mpicomp.policies.ratio_levels import suggested_compressors

_MAX_PENALTY = 0.1  # share of steps by which training may fall behind without a warning
_SHORT_STEPS = 300  # of a short training, at whose end residuals are a share of them

_log = logging.getLogger("mpicomp.watch")


class PenaltyWarning:
    """Surveys some elements in the first steps, and judges the compressor with feedback that the user named, once."""

    def __init__(self, compressor: Compressor, normalises: bool = True) -> None:
        self._normalises = normalises
        self._compressor = compressor
        suggested = suggested_compressors(None, normalises)[1]
        self._quantisers = [compressor] if isinstance(compressor, Quantiser) else suggested
        self._ranks = 1
        self._surveys: list[ElementSurvey] = []
        self._statistics: list[ElementStatistics] = []
        self._logs = False

    def start(self, shapes: Sequence[Shape], rank: int, ranks: int) -> None:
        """Begin with new buckets; rank 0 logs for all."""
        self._ranks, self._logs = ranks, rank == 0
        count = len(self._quantisers)
        self._surveys = [ElementSurvey(shape.sizes, self._quantisers) for shape in shapes]
        self._statistics = [ElementStatistics(shape.numel, count, self._normalises) for shape in shapes]

    def survey(self, bucket: int) -> ElementSurvey | None:
        """Return the survey of a bucket, until the compressor is judged."""
        return None if self._ranks == 1 else self._surveys[bucket]

    def on_telemetry(self, report: StepReport) -> bool:
        """Learn from a step, and judge the compressor once enough is known; return whether it was judged."""
        for bucket, surveys in report.surveys.items():
            self._statistics[bucket].observe(surveys)
        is_known = bool(report.surveys) and all(statistics.known for statistics in self._statistics)
        if is_known:
            self._judge(report)
        return is_known

    def _judge(self, report: StepReport) -> None:
        parts = zip(self._statistics, report.plans, report.outcomes, strict=True)
        penalty = self._mean([self._penalty(statistics, plan.scheme, outcome) for statistics, plan, outcome in parts])
        if penalty <= _MAX_PENALTY or not self._logs:
            return
        penalties = [
            self._mean([bucket.quantiser_penalty(index, self._ranks, _SHORT_STEPS) for bucket in self._statistics])
            for index in range(len(self._quantisers))
        ]
        harmless = [pair for pair in zip(penalties, self._quantisers, strict=True) if pair[0] <= _MAX_PENALTY]
        advice = "dense exchange"
        if harmless:
            least, best = min(harmless, key=lambda pair: pair[1].wire_bytes_per_element(4))
            advice = f"compressor=mpicomp.{best!r} ({least:.2f})"
        ratio = f" at a ratio of {self._compressor.ratio:g}" if hasattr(self._compressor, "ratio") else ""
        _log.warning(
            "mpicomp: with %s%s training is predicted to fall behind dense by %.2f of its steps, since most elements "
            "arrive late%s (step %d); use %s, or policy='auto', which weighs that against seconds",
            self._compressor.id,
            ratio,
            penalty,
            " and in bursts" if self._normalises else "",
            report.step,
            advice,
        )

    def _penalty(self, statistics: ElementStatistics, scheme: Scheme[Any], outcome: BucketOutcome) -> float:
        compressor = self._compressor
        if isinstance(compressor, Quantiser):
            return statistics.quantiser_penalty(0, self._ranks, _SHORT_STEPS)
        if compressor.selects_by_ratio:
            ratio = np.array([compressor.ratio])  # type: ignore[attr-defined]
            penalties = statistics.selection_penalties(ratio, self._ranks, _SHORT_STEPS, compressor.by_magnitude)
            separate, joint = penalties
            return float(joint[0] if scheme.may_drop_selected else separate[0])
        delay = 1 / outcome.gain - 1 if 0 < outcome.gain <= 1 else 0.0
        return delay_penalty(delay, statistics.signal, self._ranks, _SHORT_STEPS, self._normalises)

    def _mean(self, of_buckets: Sequence[float]) -> float:
        weights = [statistics.importance for statistics in self._statistics]
        return float(np.average(of_buckets, weights=weights)) if sum(weights) > 0 else 0.0
