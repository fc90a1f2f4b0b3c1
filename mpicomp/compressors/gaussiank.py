"""A threshold from a normal distribution, corrected by counting."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from mpicomp.compressors.estimator import Estimator, Search
from mpicomp.registry import register

_CORRECTIONS = 3  # times that the threshold may be corrected in a step
_LEAST = 5e-324  # smallest share whose quantile is taken: half of the smallest ratio is 0, which has no quantile


@register
@dataclass(frozen=True, repr=False)
class GaussianK(Estimator):
    """GaussianK-SGD (arXiv 1911.08772): the threshold that a normal distribution of the elements would have.

    ::

        threshold = NormalDist().inv_cdf(1 - ratio / 2) * np.sqrt(np.mean(x**2))
        threshold *= correction  # 1/2 and 3/2, see below
        sent = np.where(abs(x) > threshold, x, 0)

    It is halved where fewer than 2 k / 3 elements exceed it and multiplied by 1.5 where more than 4 k / 3 do, at most
    three times. Gradients have longer tails than a normal distribution, so that at small ratios it begins too low.

    Parameters
    ----------
    ratio, wire, indices
        See `Estimator` and `Sparsifier`.

    Notes
    -----
    Different from published code: the mean of the elements is taken to be 0, so their root mean square stands for the
    standard deviation; the selection follows the last correction, and is not cut to its first k elements in the order
    of indices; `Estimator` bounds the number of sent elements.
    """

    id: ClassVar[str] = "gaussiank"
    paper: ClassVar[str] = "GaussianK-SGD, Shi et al. 2019, arXiv 1911.08772; mean taken as 0, bounded by 4 k + 1024"

    def threshold(self, search: Search) -> float:
        k = search.k
        quantile = -NormalDist().inv_cdf(max(self.ratio / 2, _LEAST))
        threshold = quantile * math.sqrt(search.accumulated.energy / search.numel)
        more = 1.5 * threshold
        search.foresee((threshold, threshold / 2, more, threshold / 4, more / 2, 1.5 * more, threshold / 8, more / 4))
        for _ in range(_CORRECTIONS):
            count = search.count(threshold, 4 * k // 3 + 1)
            if 3 * count < 2 * k:
                threshold *= 0.5
            elif 3 * count > 4 * k:
                threshold *= 1.5
            else:
                break
        return threshold
