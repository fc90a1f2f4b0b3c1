"""The base class of policies that choose settings of one compressor, each with its fastest collective."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, Dense, get_compressor
from mpicomp.cost import CostModel
from mpicomp.policies.plan_selector import PlanSelector, names_for
from mpicomp.policies.policy import Plan, Policy, Shape, StepReport, UserSettings, feedback_of
from mpicomp.policies.ratio_levels import default_compressor
from mpicomp.rounds import Rounds
from mpicomp.transport.base import Transport


@dataclass(eq=False)
class Adaptive(Policy):
    """Chooses a setting of one compressor for every bucket and step, or dense.

    The collective is the one that was named; with ``"auto"`` the one of least predicted time among those that deliver
    all that every rank has selected, and dense ones, so that an exchange that is faster without compression is dense.

    To add one: derive from it and give `levels` and `choose`.
    """

    @abstractmethod
    def levels(self) -> list[Compressor]:
        """Return settings of the compressor from the least to the most that is sent, for which seconds are predicted.

        What `choose` gives is predicted to take what the nearest of them does.
        """

    @property
    def by_layer(self) -> bool:
        """Whether `choose` gives layers of a bucket settings of their own, which not every collective carries."""
        return False

    @property
    def may_be_dense(self) -> bool:
        """Whether a bucket is dense where that is predicted to be faster than what `choose` gives."""
        return True

    @abstractmethod
    def choose(self, bucket: int) -> tuple[Compressor | None, str]:
        """Return the compressor of a bucket in this step, None for dense, and the reason. Called once a step."""

    def configure(self, settings: UserSettings) -> None:
        """See `Policy.configure`. Where no compressor was named it is top-k."""
        self.compressor = settings.compressor or default_compressor()
        self.check_compressor()
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._pinned = None if settings.collective == "auto" else settings.collective
        if self._pinned is not None:
            bind(self._given(self.compressor), self._pinned)  # what does not fit is refused here
        self._selector = PlanSelector(self.id, self.feedback, settings.cost, self._pinned is not None)
        self._shapes: list[Shape] = []

    def check_compressor(self) -> None:
        """Raise `ConfigurationError` where the compressor is none that this policy can work with."""

    @property
    def cost(self) -> CostModel | None:
        """See `Policy.cost`."""
        return self._selector.cost

    @property
    def wants_telemetry(self) -> bool:
        """See `Policy.wants_telemetry`."""
        return self._selector.wants_telemetry

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        """See `Policy.start`."""
        self._shapes = list(shapes)
        ladders = []
        for shape in shapes:
            own = [level.bind(shape.names, shape.sizes, shape.shapes) for level in self.levels()]
            names = [
                [self._pinned] if self._pinned else names_for(self._given(level), transport.group, whole=True)
                for level in own
            ]
            ladders.append([*zip(own, names, strict=True), (Dense(), names_for(Dense(), transport.group))])
        yield from self._selector.start(ladders, shapes, transport)

    def _given(self, level: Compressor) -> Compressor:
        """Return a compressor such as `choose` gives, which collectives carry, or not, as they do that."""
        setting = level.layer_setting
        if not self.by_layer or setting is None:
            return level
        config = level.get_config()
        return get_compressor(config | {"layers": {"*": config[setting]}})

    def refresh(self, transport: Transport) -> Rounds[None]:
        """See `Policy.refresh`. Where the network has changed, its links are measured anew."""
        yield from self._selector.refresh(transport)

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        compressor, reason = self.choose(bucket)
        table = self._selector.tables[bucket]
        among = table.of(table.dense)
        if compressor is not None:
            own = table.of(table.level(compressor))
            among = np.concatenate((own, among)) if self.may_be_dense and not self._pinned else own
        return self._selector.plan(bucket, among, reason, compressor)

    def on_telemetry(self, report: StepReport) -> None:
        """See `Policy.on_telemetry`."""
        self._selector.on_telemetry(report)

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """See `Policy.load_state_dict`: a cost model counts where none is known yet, that of rank 0."""
        self._selector.give(cost)
