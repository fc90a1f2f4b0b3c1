"""Sketches: arrays summed into small tables, sums of these over ranks, and where a sum is largest."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, Result, Scheme
from mpicomp.compressors.base_compressor import Compressor, num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.errors import ConfigurationError
from mpicomp.setting_checks import check_choice, check_range, check_ratio
from mpicomp.workspace import Workspace

_ROWS = 1, 3, 5, 7  # an odd number, so that the median is one of them and not a mean, which could round


@dataclass(frozen=True, repr=False)
class Sketch(Compressor):
    """A compressor that sends a count sketch; see `mpicomp.kernels.cpu.countsketch`.

    Parameters
    ----------
    ratio : float
        Of the elements, those that are looked for: k is the nearest integer to ``ratio * numel``, at least 1.
    rows : {1, 3, 5, 7}
        Of the table. An element's estimate is the median over the rows.
    columns : float
        Of the table, as a fraction of the elements, in (0, 1].
    wire : {None, "fp16", "bf16"}
        How numbers travel; the 16-bit forms are summed in at least float32.
    """

    family: ClassVar[str] = "sketch"
    message: ClassVar[str] = "sketch"
    remembered: ClassVar[bool] = False
    """Whether elements that are not delivered wait in a table, and not in residuals."""

    ratio: float = 0.01
    rows: int = 3
    columns: float = 0.03
    wire: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.id, self.ratio))
        check_choice(self.id, "rows", self.rows, _ROWS)
        object.__setattr__(self, "rows", int(self.rows))
        check_range(self.id, "columns", self.columns, 0, 1)
        if self.columns == 0:
            raise ConfigurationError(f"{self.id}: columns must be above 0; without columns there is no table")
        object.__setattr__(self, "columns", float(self.columns))
        check_choice(self.id, "wire", self.wire, (None, "fp16", "bf16"))

    def table(self, numel: int) -> tuple[int, int]:
        """Return rows and columns of the table for ``numel`` elements."""
        return self.rows, num_kept(self.columns, numel)


def sum_of_tables(
    compressor: Sketch,
    array: NDArray[np.floating],
    key: int,
    accumulated: GradientWithResidual,
    context: Context,
    inner: Scheme[Dense],
) -> Exchange:
    """Return the mean of all ranks' tables as if it were the mean of arrays, flat.

    Parameters
    ----------
    compressor : Sketch
        Says how large it is.
    array : array, shape (numel,)
        The array that is sketched.
    key : int
        Of the hashes.
    accumulated, context
        As in `Scheme.exchange`.
    inner : Scheme
        The dense collective.
    """
    rows, columns = compressor.table(array.size)
    buffer = context.workspace.array("table", rows * columns + TRAILER, accumulated.dtype)
    table = buffer[:-TRAILER].reshape(rows, columns)
    table[:] = 0
    kernels.sketch_add(array, key, table)
    moments = accumulated.device_moments
    part = GradientWithResidual.ready(buffer, moments.energy, 0.0, moments.finite, accumulated.stale)
    result: Result = yield from inner.exchange(part, context)
    return result


def largest_estimates(
    table: NDArray[np.floating], key: int, numel: int, count: int, workspace: Workspace
) -> tuple[NDArray[np.uint32], NDArray[np.floating]]:
    """Return the positions of the largest estimates, and the estimates there.

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
    kernels.sketch_estimate(table, key, estimates)
    indices = workspace.array("largest", count, np.uint32)
    values = workspace.array("largest values", count, table.dtype)
    kernels.select_largest(estimates, kernels.kth_magnitude(estimates, count), indices, values)
    return indices, values
