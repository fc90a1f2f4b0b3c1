"""A sum of tables, then a sum of values at the positions that it points to."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.positions import exchange_at
from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme
from mpicomp.compressors.accumulated import TAIL, Accumulated
from mpicomp.compressors.base import Compressor
from mpicomp.compressors.countsketch import CountSketch
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.sketch import Sketch
from mpicomp.kernels import cpu
from mpicomp.rounds import Group, Round
from mpicomp.workspace import Workspace


class Sketched(Scheme[CountSketch]):
    """The ranks' tables are summed, each rank tells the largest estimates from the sum, and values there are summed.

    The mean table has the same bits on all ranks, and so have the estimates: all ranks find the same positions.

    Parameters
    ----------
    compressor : CountSketch
        Says how large the table is, and how many positions are taken.
    inner : Scheme
        Sums tables and values.
    """

    id: ClassVar[str] = "sketched"
    paper: ClassVar[str] = "the two rounds of SketchedSGD, Ivkin et al. 2019, arXiv 1903.04488, by any dense sum"
    messages: ClassVar[str] = "sketch"

    def __init__(self, compressor: CountSketch, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner

    @classmethod
    def carries(cls, compressor: type[Compressor] | Compressor) -> bool:
        """Carry sketches that are followed by values; see `Scheme.carries`."""
        return super().carries(compressor) and not getattr(compressor, "remembered", False)

    @classmethod
    def upon(cls, compressor: Compressor) -> Compressor:
        """Tables and values are summed by a dense collective."""
        return Dense(wire=getattr(compressor, "wire", None))

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Give two sums; see `Scheme.rounds`."""
        rows, columns = self.compressor.table(numel)
        lengths = rows * columns, self.compressor.count(numel)
        return [task for length in lengths for task in self._sum.rounds(length, dtype, group, step)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Sketch, sum, look for the largest, sum there; see `Scheme.exchange`."""
        key, array, weights = context.key(shared=True), accumulated.array(), self.compressor.weights(context)
        if weights is not None:
            weighted = context.workspace.array("weighted", array.size, array.dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                array = np.multiply(array, weights, out=weighted)
        first = yield from sum_of_tables(self.compressor, array, key, accumulated, context, self._sum)
        table = first.mean.reshape(self.compressor.table(array.size))
        count = self.compressor.count(array.size)
        indices, _ = largest_estimates(table, key, array.size, count, context.workspace)
        result = yield from exchange_at(indices, 1.0, accumulated, context, self._sum, first.problem)
        result.nonfinite |= first.nonfinite  # a cell may overflow where no value does
        return result


def sum_of_tables(
    compressor: Sketch,
    array: NDArray[np.floating],
    key: int,
    accumulated: Accumulated,
    context: Context,
    inner: Scheme[Dense],
) -> Exchange:
    """Give the mean of all ranks' tables as if it were the mean of arrays, flat.

    Parameters
    ----------
    compressor : Sketch
        Says how large it is.
    array : array, shape (numel,)
        What is sketched.
    key : int
        Of the hashes.
    accumulated, context
        As in `Scheme.exchange`.
    inner : Scheme
        The dense collective.
    """
    rows, columns = compressor.table(array.size)
    buffer = context.workspace.array("table", rows * columns + TAIL, accumulated.dtype)
    table = buffer[:-TAIL].reshape(rows, columns)
    table[:] = 0
    cpu.sketch_add(array, key, table)
    part = Accumulated.ready(buffer, accumulated.energy, 0.0, accumulated.finite, accumulated.stale)
    result: Result = yield from inner.exchange(part, context)
    return result


def largest_estimates(
    table: NDArray[np.floating], key: int, numel: int, count: int, workspace: Workspace
) -> tuple[NDArray[np.uint32], NDArray[np.floating]]:
    """Give the positions of the largest estimates, and the estimates there.

    Parameters
    ----------
    table : array, shape (rows, columns)
        A sum of tables.
    key : int
        Of the hashes.
    numel, count : int
        Length of the arrays, and how many positions are wanted.
    workspace : Workspace
        Where arrays come from.

    Returns
    -------
    indices, values : arrays, shape (count,)
        Indices ascending; of equal magnitudes the lower index goes first, and NaN counts as the largest.
    """
    estimates = workspace.array("estimates", numel, table.dtype)
    cpu.sketch_estimate(table, key, estimates)
    indices = workspace.array("largest", count, np.uint32)
    values = workspace.array("largest values", count, table.dtype)
    cpu.select_largest(estimates, cpu.kth_magnitude(estimates, count), indices, values)
    return indices, values
