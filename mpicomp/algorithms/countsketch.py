"""CountSketch: a sum of sketches shows where the sum of all gradients is large; exact values are summed there."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mpicomp.algorithms.sketch import Sketch, SketchScheme, largest_estimates
from mpicomp.collectives.ar_topk import exchange_at
from mpicomp.collectives.scheme import Exchange
from mpicomp.compressors.base_compressor import Entry, num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.setting_checks import check_least


@register
@dataclass(frozen=True, repr=False)
class CountSketch(Sketch):
    """SketchedSGD (arXiv 1903.04488): ranks sum sketches, and then values at the positions that the sketch points to.

    ::

        table = sum(sketch(x) for x in ranks)
        i = np.argsort(-abs(estimate(table)))[: candidates * k]
        sent[i] = x[i]

    The positions are those where the **sum** of all ranks is large, whatever each rank has there, and no index travels.
    The bytes of a rank do not grow with the number of ranks.

    Parameters
    ----------
    ratio : float
        In (0, 1]; k, the number of largest sums to be found, is the nearest integer to ``ratio * numel``, at least 1.
    rows, columns
        See `Sketch`.
    candidates : int
        Number of the largest estimates at whose positions values are summed, as a multiple of k. Estimates err: more
        candidates miss fewer of the k largest.
    momentum : float
        If not 0, momentum is applied before the residual and set to zero where something was sent, as in the paper, and
        the optimizer must not apply it again.
    wire : {None, "fp16", "bf16"}
        Format of numbers; the 16-bit forms are summed in at least float32, and the residual keeps rounding errors.

    Notes
    -----
    Different from the paper:

    - All candidates' sums are delivered, not the k largest of them: every rank has them, and others would have to wait.
      On gradients of heavy tails the same bytes delivered 13 % of the energy in place of 10.
    - Each step has other hashes. With the same ones, elements that share cells hide each other for as long as they
      wait: 8 % of the energy in place of 13.
    - Momentum is off unless asked for.
    - Numbers travel in 16 bits unless asked otherwise. On the task ``digits`` 2 bytes an element for twice as large a
      table and twice as many candidates lost 0.4 points to dense exchange where 4 bytes lost 2.

    At the defaults a message is 10.5 % of a float32 gradient: 4.5 for the table and 6 for values. At that size the
    shape of the table hardly matters: 1, 3 and 5 rows of as many cells did equally well.

    Examples
    --------
    >>> compressor = CountSketch(ratio=0.01)
    >>> compressor.table(100_000), compressor.count(100_000)
    ((3, 3000), 12000)
    """

    id: ClassVar[str] = "countsketch"
    paper: ClassVar[str] = (
        "SketchedSGD, Ivkin et al. 2019, arXiv 1903.04488; all candidates are delivered, other hashes at every step, "
        "momentum off by default"
    )

    candidates: int = 12
    wire: str | None = field(default="bf16", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("countsketch", "candidates", self.candidates)

    feedback = True

    @property
    def entry(self) -> Entry:
        return Entry(momentum=self.momentum)

    def wire_bytes_per_element(self, itemsize: int) -> float:
        numel = 1 << 20
        rows, columns = self.table(numel)
        return (rows * columns + self.count(numel)) / numel * (itemsize if self.wire is None else 2)

    def count(self, numel: int) -> int:
        """Return the number of positions at which values are summed."""
        return min(numel, self.candidates * num_kept(self.ratio, numel))


@register
class Sketched(SketchScheme[CountSketch]):
    """The ranks' tables are summed, each rank finds the largest estimates in the sum, and values there are summed.

    The mean table has the same bits on all ranks, and so have the estimates: all ranks find the same positions.
    """

    id: ClassVar[str] = "sketched"
    paper: ClassVar[str] = "the two rounds of SketchedSGD, Ivkin et al. 2019, arXiv 1903.04488, by any dense sum"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        rows, columns = self.compressor.table(numel)
        lengths = rows * columns, self.compressor.count(numel)
        return [task for length in lengths for task in self._sum.rounds(length, dtype, group, step)]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        # 1. Add every element to one cell in each row of a table, with a random sign; ranks share the hash functions.
        key, array = context.key(shared=True), accumulated.array()
        # 2. Sum the tables: the sum is the sketch of the summed gradient.
        first = yield from self.sum_of_tables(array, key, accumulated, context)
        table = first.mean_in(context.workspace).reshape(self.compressor.table(array.size))
        # 3. Estimate every element from the sum, and find the largest estimates: the same on all ranks.
        count = self.compressor.count(array.size)
        indices, _ = largest_estimates(table, key, array.size, count, context.workspace)
        # 4. Sum the exact values there. All other elements stay in the residual.
        result = yield from exchange_at(indices, 1.0, accumulated, context, self._sum, first.problem)
        result.nonfinite |= first.nonfinite  # a cell may overflow where no value does
        return result
