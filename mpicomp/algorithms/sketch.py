"""Sketches: arrays summed into small tables, sums of these over ranks, and the largest elements of a sum."""

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

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
        In (0, 1]; k, the number of elements that are searched for, is the nearest integer to ``ratio * numel``, at
        least 1.
    rows : {1, 3, 5, 7}
        Rows of the table. An element's estimate is the median over the rows.
    columns : float
        Columns of the table, as a fraction of the elements, in (0, 1].
    momentum : float
        If not 0, the compressor applies momentum, and the optimizer must not apply it again.
    wire : {None, "fp16", "bf16"}
        Format of numbers; the 16-bit forms are summed in at least float32.
    """

    family: ClassVar[str] = "sketch"
    message: ClassVar[str] = "sketch"
    remembered: ClassVar[bool] = False  # whether elements that are not delivered wait in a table, not in residuals

    ratio: float = 0.01
    rows: int = 3
    columns: float = 0.03
    momentum: float = 0.0
    wire: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_choice(self.id, "rows", self.rows, _ROWS)
        columns = check_range(self.id, "columns", self.columns, 0, 1)
        if columns == 0:
            raise ConfigurationError(f"{self.id}: columns must be above 0; without columns there is no table")
        check_choice(self.id, "wire", self.wire, (None, "fp16", "bf16"))
        ratio, momentum = check_ratio(self.id, self.ratio), check_range(self.id, "momentum", self.momentum, 0, 1)
        self._set(ratio=ratio, rows=int(self.rows), columns=columns, momentum=momentum)

    def table(self, numel: int) -> tuple[int, int]:
        """Return rows and columns of the table for ``numel`` elements."""
        return self.rows, num_kept(self.columns, numel)


SketchType = TypeVar("SketchType", bound=Sketch)


class SketchScheme(Scheme[SketchType]):
    """A scheme that sums the ranks' tables by an inner scheme."""

    messages: ClassVar[str] = "sketch"
    remembered: ClassVar[bool] = False

    def __init__(self, compressor: SketchType, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner

    @classmethod
    def supports(cls, compressor: type[Compressor] | Compressor) -> bool:
        return super().supports(compressor) and getattr(compressor, "remembered", False) == cls.remembered

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        return Dense(wire=getattr(compressor, "wire", None))

    def sum_of_tables(
        self, array: NDArray[np.floating], key: int, accumulated: GradientWithResidual, context: Context
    ) -> Exchange:
        """Return the mean of all ranks' tables of an array, flat; ``key`` is that of the hashes."""
        rows, columns = self.compressor.table(array.size)
        buffer = context.workspace.array("table", rows * columns + TRAILER, accumulated.dtype)
        table = buffer[:-TRAILER].reshape(rows, columns)
        table[:] = 0
        kernels.sketch_add(array, key, table)
        moments = accumulated.device_moments
        part = GradientWithResidual.ready(buffer, moments.energy, 0.0, moments.finite, accumulated.stale)
        result: Result = yield from self._sum.exchange(part, context)
        return result


def largest_estimates(
    table: NDArray[np.floating], key: int, numel: int, count: int, workspace: Workspace
) -> tuple[NDArray[np.uint32], NDArray[np.floating]]:
    """Return the positions of the ``count`` largest estimates from a sum of tables, ascending, and the estimates.

    Of equal magnitudes the lower index goes first, and NaN counts as the largest.
    """
    estimates = workspace.array("estimates", numel, table.dtype)
    kernels.sketch_estimate(table, key, estimates)
    indices = workspace.array("largest", count, np.uint32)
    values = workspace.array("largest values", count, table.dtype)
    kernels.select_largest(estimates, kernels.kth_magnitude(estimates, count), indices, values)
    return indices, values
