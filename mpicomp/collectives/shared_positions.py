"""Exchange of sparsifiers that pick the same positions on all ranks, by any collective for their values."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.scheme import Exchange, Scheme
from mpicomp.collectives.values_at import exchange_at
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import SharedSparsifier
from mpicomp.rounds import Group, Round


class SharedPositions(Scheme[SharedSparsifier]):
    """No indices on the wire: the values at the common positions are exchanged as a short array.

    Parameters
    ----------
    compressor : SharedSparsifier
        Picks the positions.
    inner : Scheme
        Averages the values; its name is this scheme's.
    """

    paper: ClassVar[str] = "none: the collective's own, on a shorter array"
    messages: ClassVar[str] = "dense"

    def __init__(self, compressor: SharedSparsifier, inner: Scheme[Any]) -> None:
        super().__init__(compressor)
        self._inner = inner
        self.id = inner.id  # type: ignore[misc]  # one class for as many names as there are collectives

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Return the inner collective's rounds for the values; see `Scheme.rounds`."""
        return self._inner.rounds(self.compressor.count(numel), dtype, group, step)

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        """Gather, sum, scatter; see `Scheme.exchange`."""
        numel = accumulated.numel
        indices = context.workspace.array("indices", self.compressor.count(numel), np.uint32)
        self.compressor.positions(numel, context, indices)
        return (yield from exchange_at(indices, self.compressor.weights(numel), accumulated, context, self._inner))
