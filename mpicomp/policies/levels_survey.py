"""A survey for gains as GraVAC measures them: two selections, the second among what the first has left."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors import Compressor, Context, SharedSparsifier, Sparsifier
from mpicomp.compressors.accumulated import TAIL, Accumulated, Piece
from mpicomp.compressors.base import kept
from mpicomp.places import Place, here, numbers
from mpicomp.policies.ratio_levels import at_ratio
from mpicomp.workspace import Workspace


class LevelsSurvey:
    """Energies of a bucket, of a selection of it, and of a selection of fewer elements from that selection.

    Estimators begin anew in each, so that what is measured follows from the array, the step and the ratios alone.

    Parameters
    ----------
    compressor : Sparsifier or SharedSparsifier
        Selects by a ratio.
    ratio, less : float
        Of the bucket's elements, of which the second selection takes no more than the first.
    """

    def __init__(self, compressor: Compressor, ratio: float, less: float) -> None:
        self._compressor = compressor
        self._ratio, self._less = ratio, less
        self._workspaces: dict[tuple[Place, str], Workspace] = {}

    def width(self, sizes: Sequence[int]) -> int:
        """See `Survey.width`."""
        return 3

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        """See `Survey.measure`."""
        first = self._selected(accumulated, self._ratio, step, "first")
        most = kept(self._less, accumulated.size)
        second = first if first.size <= most else self._selected(first, most / first.size, step, "second")
        with np.errstate(over="ignore"):
            return np.array(numbers(*(kernels.energy(own) for own in (accumulated, first, second))), np.float32)

    def _selected(self, array: NDArray[np.floating], ratio: float, step: int, level: str) -> NDArray[np.floating]:
        """Return the values that a ratio of an array selects."""
        compressor = at_ratio(self._compressor, ratio)
        workspace = self._workspaces.setdefault((here(), level), Workspace(here()))
        context = Context(step=step, bucket=int(level == "second"), workspace=workspace)
        if isinstance(compressor, SharedSparsifier):
            places = workspace.array("positions", compressor.count(array.size), np.uint32)
            compressor.positions(array.size, context, places)
            values: NDArray[np.floating] = workspace.array("values", places.size, array.dtype)
            kernels.gather(array, places, values)
            return values
        assert isinstance(compressor, Sparsifier)
        buffer = workspace.array("copy", array.size + TAIL, array.dtype)
        return compressor.select(Accumulated(buffer, None, [Piece(0, array)]), context).values

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> None:
        """See `Survey.energies`: those of layers are not known."""
        return
