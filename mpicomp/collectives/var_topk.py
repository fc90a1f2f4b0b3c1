"""VAR-Topk: the indices of the rank that has most to send, for all."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, check_counts
from mpicomp.collectives.shared_indices import Leading
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.device import to_python
from mpicomp.registry import register
from mpicomp.rounds import Group, Round

_HEADER = np.dtype([("energy", "<f8"), ("count", "<i8")])


@register
class VarTopk(Leading):
    """Every rank selects; those whose selection has the largest energy lend their indices to all.

    An allgatherv of 16 bytes a rank tells the energies and how many elements were selected; then see `Leading`. Of
    equal energies the lowest rank's counts, and one that is no number counts as the smallest.
    """

    id: ClassVar[str] = "var-topk"
    precedence: ClassVar[int] = 5
    paper: ClassVar[str] = (
        "AR-Topk with variance-based selection, Tyagi and Swany 2023, arXiv 2312.02493; energies in float64, ties to "
        "the lowest rank, indices coded or of 32 bits, residuals start at zero, gain from all ranks' norms"
    )
    messages: ClassVar[str] = "sparse"
    by_value = True

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        return [
            self._compare(group),
            *self._rounds_led(0, self.compressor.expected(numel), numel, dtype, group, step),
        ]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group = context.group
        chosen = self.compressor.select(accumulated, context)
        compare = self._compare(group)
        [energy] = to_python(kernels.energy(chosen.values))
        header = np.array([(energy, chosen.indices.size)], _HEADER)
        compare.send = header.view(np.uint8)
        compare.recv = context.workspace.host_array("headers", sum(compare.counts), np.uint8)
        headers = (yield compare).view(_HEADER)
        sent = group.rank, chosen.indices.size
        counts = check_counts(self.id, headers["count"], 0, accumulated.numel, sent)
        leader = _leader(headers["energy"])
        return (yield from self._exchange_led(leader, counts[leader], chosen, accumulated, context))

    def _compare(self, group: Group) -> Round:
        return Round("allgatherv", [_HEADER.itemsize] * group.size, np.dtype(np.uint8))


def _leader(energies: NDArray[np.floating]) -> int:
    """Return the rank of the largest energy.

    Examples
    --------
    >>> _leader(np.array([np.nan, 1, 3, 3])), _leader(np.array([np.nan, np.nan])), _leader(np.array([0.0, np.inf]))
    (2, 0, 1)
    """
    return int(np.argmax(np.where(np.isnan(energies), -1.0, energies)))
