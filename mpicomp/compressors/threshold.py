"""Elements above a magnitude that stays the same."""

import math
from dataclasses import dataclass
from typing import ClassVar

from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.candidates import list_candidates
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import Selection
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_range

_SHARE = 0.01  # assumed kept fraction of a fixed threshold before the first step
_SLACK = 1024  # elements that can be listed beyond twice what the step before had


@register
@dataclass(frozen=True, repr=False)
class Threshold(Sparsifier):
    """Every element of at least a magnitude that stays the same over training.

    ::

        sent = np.where(abs(x) >= limit, x, 0)

    Top-k loses least in every step; a fixed threshold loses least over a training for the same number of elements sent,
    since more is sent when gradients are large. The size of messages follows the data, from nothing to the whole array.

    Parameters
    ----------
    limit : float
        Magnitudes of at least this are sent; 0 sends whatever is not zero. An element waits in the residual until its
        sum reaches the limit: about ``(limit / s)**2`` steps for independent gradients of standard deviation s. So ten
        standard deviations keep about 1 %, as the default does for elements of about 0.001.
    wire, indices
        See `Sparsifier`.

    Notes
    -----
    The published reducer has 0.5 as its default, and compares gradients that are multiplied by the learning rate.
    """

    id: ClassVar[str] = "threshold"
    paper: ClassVar[str] = "hard threshold, Sahu et al. 2021, arXiv 2108.00951; on gradients without the learning rate"

    limit: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(limit=check_range("threshold", "limit", self.limit, 0, math.inf))

    def expected(self, numel: int) -> int:
        return num_kept(_SHARE, numel)  # the fraction that the limit keeps is known only from the data

    def select(self, accumulated: GradientWithResidual, context: Context) -> Selection:
        # Elements above the next smaller magnitude are those that reach the limit.
        below = cpu.magnitude_of(max(0, cpu.magnitude_bits(self.limit, accumulated.dtype) - 1), accumulated.dtype)
        room = context.memory.get("threshold.room", self.expected(accumulated.numel))
        whole = slice(0, accumulated.numel), below, 2 * room + _SLACK
        [candidates] = list_candidates(accumulated, context, [whole])
        selection = candidates.above(below, room)
        context.memory["threshold.room"] = selection.indices.size
        return selection
