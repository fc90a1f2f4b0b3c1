"""A threshold between the mean and the largest magnitude, found in a few coarse steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpicomp.compressors.estimator import Estimator, Search
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice

_WIDTH = 0.2  # width of the interval at which the binary search ends
_HALVES = (0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875)  # places that the binary search can come to
_TRIMS = (0.8, 0.6, 0.4, 0.2, 0.0)  # places of the thresholds tried by trimming, from the mean (0) to the largest (1)


@register
@dataclass(frozen=True, repr=False)
class RedSync(Estimator):
    """RedSync (arXiv 1808.04357): a coarse search for the threshold ``mean + t * (largest - mean)`` of magnitudes.

    ::

        mean, largest = np.mean(abs(x)), abs(x).max()
        threshold = mean + t * (largest - mean)  # t: see ``search``
        sent = np.where(abs(x) > threshold, x, 0)

    The number of selected elements is often far from k: t takes few values, and the largest magnitude moves them all.

    Parameters
    ----------
    search : {"binary", "trimmed"}
        ``"binary"`` halves the interval of t, first [0, 1], until it is shorter than 0.2, and takes the last t. It ends
        sooner if more than k and fewer than 2 k elements exceed the threshold; with fewer than k / 2 it goes on below,
        otherwise above. ``"trimmed"`` takes the first t of 0.8, 0.6 ... 0 above which there are k elements.
    ratio, wire, indices
        See `Estimator` and `Sparsifier`.

    Notes
    -----
    Different from the paper's system: the threshold is found at every step, the search does not depend on a layer's
    size, and values travel as they are, not as one mean. Different from published code: `Estimator` bounds the number
    of sent elements.
    """

    id: ClassVar[str] = "redsync"
    paper: ClassVar[str] = "RedSync, Fang et al. 2018, arXiv 1808.04357; bounded by 4 k + 1024, values in full"

    ranks: ClassVar[Sequence[int]] = (1,)

    search: str = "binary"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("redsync", "search", self.search, ("binary", "trimmed"))

    def threshold(self, search: Search) -> float:
        mean, span = search.mean, search.top() - search.mean
        if not 0 < span < float("inf"):
            return float("nan")
        k, place = search.k, 0.0
        search.foresee(mean + t * span for t in (_TRIMS if self.search == "trimmed" else _HALVES))
        if self.search == "trimmed":
            return next((mean + t * span for t in _TRIMS if search.count(mean + t * span, k) >= k), mean)
        low, high = 0.0, 1.0
        while high - low > _WIDTH:
            place = (low + high) / 2
            count = search.count(mean + place * span, 2 * k)
            if k < count < 2 * k:
                break
            if 2 * count < k:
                high = place
            else:
                low = place
        return mean + place * span
