"""The compressor that was named, at every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives import bind, fitting
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import CostModel
from mpicomp.policies.plan_selector import PlanSelector, names_for
from mpicomp.policies.policy import Plan, Policy, Shape, StepReport, UserSettings, feedback_of, model_of
from mpicomp.policies.surveys import Survey
from mpicomp.policies.watch import Watch
from mpicomp.registry import register
from mpicomp.rounds import Rounds
from mpicomp.transport.base import Transport


@register
@dataclass(eq=False)
class Static(Policy):
    """One compressor as it was named, carried by the collective that was named.

    With the collective ``"auto"`` it is the one of least predicted time among those that deliver all that every rank
    has selected, exchanges without compression among them where these may take its place. Others deliver less than the
    compressor's name promises, which seconds do not tell: they run where they are named.
    """

    id: ClassVar[str] = "static"

    def configure(self, settings: UserSettings) -> None:
        """See `Policy.configure`."""
        self.compressor = Dense() if settings.compressor is None else settings.compressor
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._pinned = None if settings.collective == "auto" else settings.collective
        # What does not fit, or needs what is not installed, is refused here: later a rank might fail alone.
        bind(self.compressor, self._pinned or fitting(self.compressor)[0])
        self._watch = Watch(self.compressor, settings.normalises) if self.feedback else None
        pinned = self._pinned is not None
        self._selector = PlanSelector("static" if pinned else "auto", self.feedback, settings.cost, pinned)

    @property
    def cost(self) -> CostModel | None:
        """See `Policy.cost`."""
        return self._selector.cost

    @property
    def wants_telemetry(self) -> bool:
        """See `Policy.wants_telemetry`."""
        return self._selector.wants_telemetry

    def survey(self, bucket: int) -> Survey | None:
        """See `Policy.survey`: some elements in the first steps, to warn where training will fall behind."""
        return None if self._watch is None else self._watch.survey(bucket)

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        """See `Policy.start`."""
        ladders: list[list[tuple[Compressor, list[str]]]] = []
        model = model_of(shapes)
        for shape in shapes:
            own = self.compressor.bind(shape.names, shape.sizes, shape.shapes, model=model)
            names_of_own = [self._pinned] if self._pinned else names_for(own, transport.group, whole=True)
            levels: list[tuple[Compressor, list[str]]] = [(own, names_of_own)]
            if self._pinned is None and own != Dense() and own.can_fall_back_to_dense:
                levels.append((Dense(), names_for(Dense(), transport.group)))
            ladders.append(levels)
        yield from self._selector.start(ladders, shapes, transport)
        if self._watch is not None and transport.probes:
            self._watch.start(shapes, transport.group.rank, transport.group.size)

    def refresh(self, transport: Transport) -> Rounds[None]:
        """See `Policy.refresh`. Where the network has changed, its links are measured anew."""
        yield from self._selector.refresh(transport)

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        table = self._selector.tables[bucket]
        return self._selector.plan(bucket, np.arange(len(table.schemes)), "pinned" if self._pinned else "")

    def on_telemetry(self, report: StepReport) -> None:
        """See `Policy.on_telemetry`."""
        self._selector.on_telemetry(report)
        if self._watch is not None:
            self._watch.on_telemetry(report)

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """See `Policy.load_state_dict`: a cost model counts where none is known yet, that of rank 0."""
        self._selector.give(cost)
