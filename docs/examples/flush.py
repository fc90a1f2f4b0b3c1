"""A policy in one file: what was kept back is sent in full now and then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mpicomp
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Adaptive, BucketOutcome, UserSettings


@mpicomp.register
@dataclass(eq=False)
class Flush(Adaptive):
    """The compressor that was named, and dense in one step of many.

    Parameters
    ----------
    every : int
        Of so many steps the last one is dense.
    """

    id: ClassVar[str] = "flush"
    paper: ClassVar[str] = "none: an example"

    every: int = 100

    def check(self) -> None:
        """Refuse what cannot be."""
        if self.every < 1:
            raise ConfigurationError(f"flush: every must be at least 1, got {self.every!r}")

    def configure(self, settings: UserSettings) -> None:
        """Begin to count."""
        super().configure(settings)
        self._steps = 0

    def levels(self) -> list[mpicomp.Compressor]:
        """Give what is sent, apart from dense, so that its seconds are predicted."""
        return [self.compressor]

    def choose(self, bucket: int) -> tuple[mpicomp.Compressor | None, str]:
        """Give None, which is dense, in the last step of many."""
        if (self._steps + 1) % self.every == 0:
            return None, "flush"
        return self.compressor, f"{self._steps % self.every} steps after a flush"

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        """Count a step; one that was undone does not come here."""
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint has to hold."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """Go on where the checkpoint was written."""
        super().load_state_dict(state, cost)
        self._steps = int(state.get("steps", 0))
