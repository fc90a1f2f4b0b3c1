"""A word of warning: what was named makes training fall behind, and what would not."""

import logging
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from mpicomp.collectives import Scheme
from mpicomp.compressors import Compressor, Quantiser
from mpicomp.policies.elements import Elements, ElementSurvey
from mpicomp.policies.families import families
from mpicomp.policies.policy import BucketOutcome, Shape, StepReport

_MUCH = 0.1  # share of steps by which training may fall behind before that is said
_SHORT = 300  # steps of a training that is taken for a short one: what waits in the end is a share of them

_log = logging.getLogger("mpicomp.watch")


class Watch:
    """Looks at some elements in the first steps, and judges the compressor that was named, once.

    Parameters
    ----------
    compressor : Compressor
        What was named, with error feedback.
    normalises : bool
        See `Elements`.
    """

    def __init__(self, compressor: Compressor, normalises: bool = True) -> None:
        self._normalises = normalises
        self._compressor = compressor
        self._tried: list[Quantiser] = [compressor] if isinstance(compressor, Quantiser) else families(None)[1]
        self._ranks = 1
        self._surveys: list[ElementSurvey] = []
        self._elements: list[Elements] = []
        self._speaks = False
        self._judged = compressor.message == "dense"

    def start(self, shapes: Sequence[Shape], rank: int, ranks: int) -> None:
        """Take up new buckets; rank 0 speaks for all."""
        if self._judged:
            return
        self._ranks, self._speaks = ranks, rank == 0
        self._surveys = [ElementSurvey(shape.numel, self._tried) for shape in shapes]
        self._elements = [Elements(shape.numel, len(self._tried), self._normalises) for shape in shapes]

    def survey(self, bucket: int) -> ElementSurvey | None:
        """Return the survey of a bucket, until judgement was passed."""
        return None if self._judged or self._ranks == 1 else self._surveys[bucket]

    def on_telemetry(self, report: StepReport) -> None:
        """Learn from a step, and say what there is to say once enough is known."""
        if self._judged or not report.surveys:
            return
        for bucket, surveys in report.surveys.items():
            self._elements[bucket].observe(surveys)
        if all(own.known for own in self._elements):
            self._judge(report)
            self._judged, self._surveys, self._elements = True, [], []

    def _judge(self, told: StepReport) -> None:
        schemes = [plan.scheme for plan in told.plans]
        parts = zip(range(len(self._elements)), schemes, told.outcomes, strict=True)
        behind = self._mean([self._behind(*part) for part in parts])
        if behind <= _MUCH or not self._speaks:
            return
        of_tried = [
            (self._mean([own.behind_with(place, self._ranks, _SHORT) for own in self._elements]), tried)
            for place, tried in enumerate(self._tried)
        ]
        least, few_bits = min(of_tried, key=itemgetter(0), default=(1.0, None))
        instead = f"compressor=mpicomp.{few_bits!r} ({least:.2f})" if least <= _MUCH else "dense exchange"
        ratio = f" at a ratio of {self._compressor.ratio:g}" if hasattr(self._compressor, "ratio") else ""
        _log.warning(
            "mpicomp: with %s%s training is predicted to fall behind dense by %.2f of its steps, since most elements "
            "arrive late%s (step %d); use %s, or policy='auto', which weighs that against seconds",
            self._compressor.id,
            ratio,
            behind,
            " and in bursts" if self._normalises else "",
            told.step,
            instead,
        )

    def _behind(self, bucket: int, scheme: Scheme, delivered: BucketOutcome) -> float:  # type: ignore[type-arg]
        own, compressor = self._elements[bucket], self._compressor
        if isinstance(compressor, Quantiser):
            return own.behind_with(0, self._ranks, _SHORT)
        if compressor.selects_by_ratio:
            ratio = np.array([compressor.ratio])  # type: ignore[attr-defined]
            apart, together = own.behind(ratio, self._ranks, _SHORT, compressor.by_magnitude)
            return float(together[0] if scheme.may_drop_selected else apart[0])
        late = 1 / delivered.gain - 1 if 0 < delivered.gain <= 1 else 0.0
        return own.behind_after(late, self._ranks, _SHORT)

    def _mean(self, of_buckets: Sequence[float]) -> float:
        """Return the mean over elements."""
        numels = [own.numel for own in self._elements]
        return float(np.average(of_buckets, weights=numels)) if sum(numels) > 0 else 0.0
