"""A fixed number of elements, by a threshold from above and one from below."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import check_ratio, kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.estimator import Search
from mpicomp.compressors.kinds import Selection, Sparsifier
from mpicomp.errors import ConfigurationError
from mpicomp.places import numbers
from mpicomp.registry import register


@register
@dataclass(frozen=True, repr=False)
class MSTopK(Sparsifier):
    """MSTopK (arXiv 2010.10458): k elements, chosen by bisection of a threshold between mean and largest magnitude.

    Bisection leaves two thresholds, one that at most k elements exceed and one that more than k do. Everything above
    the upper one is sent, and what is missing is taken from between them: a run of neighbours in the order of indices,
    from a random place on.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    samplings : int
        Thresholds that are tried.
    wire, indices
        See `Sparsifier`.

    Notes
    -----
    Different from published code: exactly the k largest are sent where no threshold that was tried has more than k
    elements above it (more than k are asked for than exceed the mean, or all magnitudes are equal), where more than 8 k
    are left above the lower one, and where there are infinities or NaN.

    Examples
    --------
    >>> MSTopK(ratio=0.01).count(1000)
    10
    """

    id: ClassVar[str] = "mstopk"
    paper: ClassVar[str] = "MSTopK, Shi et al. 2020, arXiv 2010.10458; exact top-k where the bracket is of no use"

    ratio: float = 0.01
    samplings: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ratio", check_ratio("mstopk", self.ratio))
        if not isinstance(self.samplings, int) or isinstance(self.samplings, bool) or self.samplings < 1:
            raise ConfigurationError(f"mstopk: samplings must be an integer of at least 1, got {self.samplings!r}")

    def count(self, numel: int) -> int:
        """Return k."""
        return kept(self.ratio, numel)

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        """Bisect, and select k; see `Sparsifier.select`."""
        search = Search("mstopk", accumulated, context, self.count(accumulated.numel))
        selection = self._bracketed(search, context) if accumulated.finite else None
        if selection is None:
            selection, threshold = search.candidates.largest(search.k)
            search.remember(threshold, search.k)
        return selection

    def _bracketed(self, search: Search, context: Context) -> Selection | None:
        """Return the selection that bisection finds; None where it is of no use."""
        k, mean, top = search.k, search.mean, search.top()
        if not 0 <= mean < top:
            return None
        # Where no list covers what is asked for, what exceeds the lower threshold is gathered as soon as it is little.
        pool: Selection | None = None
        low, high, lower, upper = 0.0, 1.0, math.nan, top
        for _ in range(self.samplings):
            middle = (low + high) / 2
            threshold = mean + middle * (top - mean)
            if pool is None:
                count = search.count(threshold, k + 1)
            else:
                [count] = numbers(kernels.tail(pool.values, threshold).count)
            if count > k:
                low, lower = middle, threshold
                if pool is None and count <= search.room and search.candidates.listed <= k:
                    pool = search.candidates.above(threshold, count)
            else:
                high, upper = middle, threshold
                if count == k:
                    pool = pool or search.candidates.above(threshold, k)
                    break
        if pool is None:
            count = 0 if math.isnan(lower) else search.count(lower, search.room + 1)
            if not 0 < count <= search.room:
                return None
            pool = search.candidates.above(lower, count)
        search.remember(upper if math.isnan(lower) else lower, k)
        return _run(pool, lower, upper, k, context)


def _run(pool: Selection, lower: float, upper: float, k: int, context: Context) -> Selection:
    """Select all elements above the upper threshold, and a run of those between the two to make it k."""
    number = pool.values.dtype.type
    magnitudes = context.workspace.array("mstopk.magnitudes", pool.values.size, pool.values.dtype)
    np.abs(pool.values, out=magnitudes)
    sent = magnitudes > number(upper)
    between = np.flatnonzero((magnitudes > number(lower)) & ~sent)
    [above] = numbers(np.count_nonzero(sent))
    missing = k - above
    if missing:
        start = context.random(shared=False).integers(between.size - missing + 1)
        sent[between[start : start + missing]] = True
    chosen = np.flatnonzero(sent)
    return Selection(
        np.take(pool.indices, chosen, out=context.workspace.array("mstopk.indices", k, np.uint32)),
        np.take(pool.values, chosen, out=context.workspace.array("mstopk.values", k, pool.values.dtype)),
    )
