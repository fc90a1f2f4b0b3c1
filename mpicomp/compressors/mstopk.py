"""A fixed number of elements, by a threshold from above and one from below."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.estimator import Search
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import to_python
from mpicomp.registry import register
from mpicomp.setting_checks import check_least


@register
@dataclass(frozen=True, repr=False)
class MSTopK(Sparsifier):
    """MSTopK (arXiv 2010.10458): k elements, chosen by bisection of a threshold between mean and largest magnitude.

    ::

        lower, upper = bisect(lambda t: np.count_nonzero(abs(x) > mean + t * (largest - mean)) - k, samplings)
        chosen = (abs(x) > upper) | run_of(abs(x) > lower, length=k - np.count_nonzero(abs(x) > upper))
        sent = np.where(chosen, x, 0)

    Bisection leaves two thresholds, one that at most k elements exceed and one that more than k do. Everything above
    the upper one is sent, and so is a run of elements between the two, in the order of indices, from a random place on.

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
    Different from published code: exactly the k largest are sent if no threshold tried has more than k elements above
    it (fewer exceed the mean, or all magnitudes are equal), if more than 8 k are above the lower one, and if there are
    infinities or NaN.
    """

    id: ClassVar[str] = "mstopk"
    paper: ClassVar[str] = "MSTopK, Shi et al. 2020, arXiv 2010.10458; exact top-k where the bracket is of no use"

    ratio: float = 0.01
    samplings: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("mstopk", "samplings", self.samplings, 1)

    def count(self, numel: int) -> int:
        return num_kept(self.ratio, numel)

    def select(self, accumulated: GradientWithResidual, context: Context) -> Selection:
        k, numel = self.count(accumulated.numel), accumulated.numel
        search = Search("mstopk", accumulated, context, k, (1, k, min(k + 1, numel)))
        selection = self._bracketed(search, context) if accumulated.finite else None
        return search.exactly(k) if selection is None else selection

    def _bracketed(self, search: Search, context: Context) -> Selection | None:
        """Return the selection that bisection finds; None if it finds none."""
        mean, top = search.mean, search.top()
        if not 0 <= mean < top:
            return None
        counted: _Counted | _Ranked = _Ranked(search) if search.waits else _Counted(search)
        low, high, lower, upper = 0.0, 1.0, math.nan, top
        for _ in range(self.samplings):
            middle = (low + high) / 2
            threshold = mean + middle * (top - mean)
            excess = counted.excess(threshold)
            if excess > 0:
                low, lower = middle, threshold
                continue
            high, upper = middle, threshold
            if excess == 0:
                break
        bottom = upper if excess == 0 else lower
        if math.isnan(bottom):
            return None
        pool = counted.pool
        if pool is None:
            count = search.count(bottom, search.room + 1)
            if not 0 < count <= search.room:
                return None
            pool = search.candidates.above(bottom, count, known=True)
        search.remember(upper if math.isnan(lower) else lower, search.k)
        return _run(pool, lower, upper, search.k, context)


class _Counted:
    """Counts how many elements more than k exceed a threshold, in a pool of few elements as soon as there is one."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.pool: Selection | None = None

    def excess(self, threshold: float) -> int:
        search, k = self._search, self._search.k
        if self.pool is not None:
            return kernels.tail(self.pool.values, threshold).count - k
        count = search.count(threshold, k + 1)
        if k < count <= search.room and search.candidates.listed <= k:
            self.pool = search.candidates.above(threshold, count)
        return count - k


class _Ranked:
    """Returns the sign of that number, by the magnitudes of ranks k and k + 1, which are read once."""

    pool = None

    def __init__(self, search: Search) -> None:
        self._number = search.accumulated.dtype.type
        self._kth = search.magnitude(search.k)
        self._next = search.magnitude(search.k + 1) if search.k < search.numel else -1.0

    def excess(self, threshold: float) -> int:
        limit = self._number(threshold)
        return int(self._kth > limit) + int(self._next > limit) - 1


def _run(pool: Selection, lower: float, upper: float, k: int, context: Context) -> Selection:
    """Select all elements above the upper threshold, and a run of those between the two to make it k."""
    number = pool.values.dtype.type
    magnitudes = context.workspace.array("mstopk.magnitudes", pool.values.size, pool.values.dtype)
    np.abs(pool.values, out=magnitudes)
    chosen = magnitudes > number(upper)
    between = (magnitudes > number(lower)) & ~chosen
    above, among = to_python(np.count_nonzero(chosen), np.count_nonzero(between))
    missing = k - above
    if missing:
        start = context.random(shared=False).integers(among - missing + 1)
        place = np.cumsum(between)
        chosen |= between & (place > start) & (place <= start + missing)
    indices = context.workspace.array("mstopk.indices", k, np.uint32)
    values = context.workspace.array("mstopk.values", k, pool.values.dtype)
    # Positions of the chosen ones, by a kernel that does not wait for their number, which is k.
    positions = context.workspace.array("mstopk.positions", k, np.uint32)
    kernels.select_above(chosen.astype(pool.values.dtype), 0.5, 0, positions, values, 0)
    return Selection(np.take(pool.indices, positions, out=indices), np.take(pool.values, positions, out=values))
