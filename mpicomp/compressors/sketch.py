"""What compressors have in common that sum arrays into small tables."""

from dataclasses import dataclass, field
from typing import ClassVar

from mpicomp.compressors.base import Compressor, check_choice, check_range, check_ratio, kept
from mpicomp.errors import ConfigurationError

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
    """Whether what is not delivered waits in a table, and not in residuals."""

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
        """Give rows and columns of the table for ``numel`` elements."""
        return self.rows, kept(self.columns, numel)
