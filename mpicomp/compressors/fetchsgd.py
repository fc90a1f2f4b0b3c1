"""Sketches are summed and remembered, and what is large in what is remembered is delivered."""

from dataclasses import dataclass
from typing import ClassVar

from mpicomp.compressors.base import check_range, kept
from mpicomp.compressors.registry import register_compressor
from mpicomp.compressors.sketch import Sketch


@register_compressor
@dataclass(frozen=True, repr=False)
class FetchSGD(Sketch):
    """FetchSGD (arXiv 2007.07682): momentum and error feedback in tables that are the same on all ranks.

    Ranks sum their sketches in one round and keep nothing of their own. With the mean table ``S``, each rank makes the
    server's step: ``V = momentum * V + S``, ``E = E + V``; the k largest estimates from ``E`` are delivered, and the
    cells that they are in are set to zero in ``V`` and ``E``.

    Parameters
    ----------
    ratio : float
        Delivered fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    rows : {1, 3, 5, 7}
        Of the table. An element's estimate is the median over the rows.
    columns : float
        Of the table, as a fraction of the elements, in (0, 1]. Several times the ratio: in a table of about as many
        columns as elements are delivered, most cells would be set to zero in each step.
    momentum : float
        Where it is not 0 the optimizer must not apply its own.
    wire : {None, "fp16", "bf16"}
        How numbers travel; the 16-bit forms are summed in at least float32, and what they round away is lost.

    Notes
    -----
    It runs without error feedback, and is refused with it: what was not delivered is in the table, and a residual would
    put it in once more.

    What is delivered are estimates. The tables hold what was put in but was not delivered, to what is set to zero: that
    takes with it everything else in those cells, and whatever an estimate was wrong by. So the sum of all gradients is
    not kept, other than with `CountSketch`. Taking away the sketch of what is delivered would keep it, and diverges, as
    published code has found.

    Different from the paper and its published code:

    - The learning rate is outside: what waits in the table is delivered at the rate of that step, as in published code.
    - Momentum is off unless asked for.
    - ``gain`` is not told: what a step delivers is not of that step's gradients.

    A bucket of other length than before begins with empty tables, and one that is not finite leaves them as they were.

    Examples
    --------
    >>> compressor = FetchSGD(ratio=0.01)
    >>> compressor.table(100_000), compressor.count(100_000)
    ((5, 5000), 1000)
    """

    id: ClassVar[str] = "fetchsgd"
    remembered: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Rothchild et al. 2020, arXiv 2007.07682; the server's step on every rank, learning rate outside, momentum off "
        "by default"
    )

    rows: int = 5
    columns: float = 0.05
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("fetchsgd", "momentum", self.momentum, 0, 1)
        object.__setattr__(self, "momentum", float(self.momentum))

    @property
    def feedback(self) -> bool:
        """What waits does so in the table."""
        return False

    @property
    def contractive(self) -> bool:
        """A residual would keep what is in the table already."""
        return False

    @property
    def replaceable(self) -> bool:
        """Not with momentum: it is delivered with that in it, and a dense step would be without."""
        return not self.momentum

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Give the table in a bucket of 2**20 elements."""
        numel = 1 << 20
        rows, columns = self.table(numel)
        return rows * columns / numel * (itemsize if self.wire is None else 2)

    def count(self, numel: int) -> int:
        """Give the number of elements delivered out of ``numel``."""
        return kept(self.ratio, numel)
