"""The compressor that was named, at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.measured_policy import Named
from mpicomp.policies.penalty_warning import PenaltyWarning
from mpicomp.policies.plan_selector import PlanSelector
from mpicomp.policies.policy import Plan, Shape, StepReport, UserSettings
from mpicomp.policies.surveys import Survey
from mpicomp.registry import register


@register
@dataclass(eq=False)
class Static(Named):
    """The compressor and collective that the user named; see `Named`."""

    id: ClassVar[str] = "static"

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        judges = self.feedback and self.compressor.message != "dense"
        self._warning = PenaltyWarning(self.compressor, settings.normalises) if judges else None
        pinned = self._pinned is not None
        self._selector = PlanSelector("static" if pinned else "auto", self.feedback, settings.cost, pinned)

    def survey(self, bucket: int) -> Survey | None:
        # In the first steps, to warn if training will fall behind
        return None if self._warning is None else self._warning.survey(bucket)

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        yield from super().start(shapes, transport)
        self._rows = [np.arange(len(table.schemes)) for table in self._selector.tables]
        if not transport.probes or transport.group.size == 1:
            self._warning = None  # nothing is late
        if self._warning is not None:
            self._warning.start(shapes, transport.group.rank, transport.group.size)

    def repeats(self) -> bool:
        return self._warning is None and self._selector.repeats()

    def plan(self, bucket: int) -> Plan:
        return self._selector.plan(bucket, self._rows[bucket], "pinned" if self._pinned else "")

    def on_telemetry(self, report: StepReport) -> None:
        super().on_telemetry(report)
        if self._warning is not None and self._warning.on_telemetry(report):
            self._warning = None
