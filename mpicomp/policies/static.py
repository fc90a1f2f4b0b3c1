"""The compressor that was named, at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicomp.collectives import bind, fitting
from mpicomp.compressors import Compressor, Dense
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.measured_policy import MeasuredPolicy
from mpicomp.policies.penalty_warning import PenaltyWarning
from mpicomp.policies.plan_selector import PlanSelector, collectives_for
from mpicomp.policies.policy import Plan, Shape, StepReport, UserSettings, feedback_of, model_of
from mpicomp.policies.surveys import Survey
from mpicomp.registry import register


@register
@dataclass(eq=False)
class Static(MeasuredPolicy):
    """The compressor and collective that the user named.

    The collective ``"auto"`` is the one of least predicted time among those that deliver all that every rank has
    selected, and dense ones if these may replace the compressor. Others deliver less than the compressor promises,
    which seconds do not show: they run if they are named.
    """

    id: ClassVar[str] = "static"

    def configure(self, settings: UserSettings) -> None:
        self.compressor = Dense() if settings.compressor is None else settings.compressor
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._pinned = None if settings.collective == "auto" else settings.collective
        # A pair that does not fit, or needs another package, raises here: later a single rank might fail.
        bind(self.compressor, self._pinned or fitting(self.compressor)[0])
        judges = self.feedback and self.compressor.message != "dense"
        self._warning = PenaltyWarning(self.compressor, settings.normalises) if judges else None
        pinned = self._pinned is not None
        self._selector = PlanSelector("static" if pinned else "auto", self.feedback, settings.cost, pinned)

    def survey(self, bucket: int) -> Survey | None:
        """Return a survey in the first steps, to warn if training will fall behind."""
        return None if self._warning is None else self._warning.survey(bucket)

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        ladders: list[list[tuple[Compressor, list[str]]]] = []
        model = model_of(shapes)
        for shape in shapes:
            bound = self.compressor.bind(shape.names, shape.sizes, shape.shapes, model=model)
            names = [self._pinned] if self._pinned else collectives_for(bound, transport.group, complete=True)
            levels: list[tuple[Compressor, list[str]]] = [(bound, names)]
            if self._pinned is None and bound != Dense() and bound.can_fall_back_to_dense:
                levels.append((Dense(), collectives_for(Dense(), transport.group)))
            ladders.append(levels)
        yield from self._selector.start(ladders, shapes, transport)
        self._rows = [np.arange(len(table.schemes)) for table in self._selector.tables]
        if self._warning is not None and transport.probes:
            self._warning.start(shapes, transport.group.rank, transport.group.size)

    def plan(self, bucket: int) -> Plan:
        return self._selector.plan(bucket, self._rows[bucket], "pinned" if self._pinned else "")

    def on_telemetry(self, report: StepReport) -> None:
        super().on_telemetry(report)
        if self._warning is not None:
            self._warning.on_telemetry(report)
            if self._warning.is_done:
                self._warning = None
