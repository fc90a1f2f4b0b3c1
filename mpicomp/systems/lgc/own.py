"""The second phase of LGC as it is published: every rank sends its own largest values, with their indices."""

from dataclasses import dataclass, field
from typing import ClassVar

from mpicomp.collectives.allgather import Allgather
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import Selection
from mpicomp.systems.lgc.compressor import LGC, Selected
from mpicomp.systems.lgc.lead import own_values


@dataclass(frozen=True, repr=False)
class OwnLargest(Sparsifier):
    """The largest values of each layer on this rank, and everything in those that travel dense.

    Parameters
    ----------
    selected : Selected
        How many of each layer.
    wire, indices
        See `Sparsifier`.
    """

    id: ClassVar[str] = "lgc"
    paper: ClassVar[str] = LGC.paper

    selected: Selected = field(default_factory=lambda: Selected(()))

    def count(self, numel: int) -> int:
        return self.selected.count

    def select(self, accumulated: GradientWithResidual, context: Context) -> Selection:
        return Selection(*own_values(self.selected, accumulated, context))


def gather_own(compressor: LGC, selected: Selected) -> Allgather:
    """Return the exchange of every rank's own values in a bucket."""
    return Allgather(OwnLargest(selected, wire=compressor.wire))
