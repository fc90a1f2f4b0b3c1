"""Sparsifiers with a threshold: estimated from a distribution, a search, a bisection or a sample, or fixed."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, repeat
from operator import mul
from statistics import NormalDist
from typing import ClassVar, Self

import numpy as np

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import BucketParameters, Entry, num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire import Selection
from mpicomp.errors import ConfigurationError
from mpicomp.gpu import current_device, to_python
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_least, check_range

_MAX_LISTED = 4  # candidates that can be stored, as a multiple of k
_MANY_LISTED = 3  # candidates, as a multiple of those sent, from which on the gap between bound and threshold is halved
_FIRST_GAP = 0.1  # share of the threshold; it adapts, since elements crowd below the threshold under error feedback
_MIN_GAP, _MAX_GAP = 1e-6, 0.5
_MAX_FACTOR = 4  # times k: more elements than that and _SLACK are never sent
_SLACK = 1024  # elements beyond k that cost nothing
_MAX_FORESEEN = 8  # thresholds that are counted in one sweep


def max_sent(k: int) -> int:
    """Return how many elements are ever sent where k are wanted."""
    return _MAX_FACTOR * k + _SLACK


class Search:
    """Count and select the elements above a threshold, for a compressor that is to send k of them.

    On the host elements are listed in the sweep that computes the sum, by a bound from the step before; counts and
    selections never depend on it. On a device the host waits longer for a number than a sweep takes: nothing is listed,
    and likely counts are computed beforehand and read at once. ``name`` is the bound's key in the memory, ``ranks`` are
    those of `magnitudes`.
    """

    def __init__(
        self, name: str, accumulated: Accumulated, context: Context, k: int, ranks: Sequence[int] = ()
    ) -> None:
        self.accumulated, self.k, self.memory = accumulated, k, context.memory
        self.numel, self.room = accumulated.numel, _MAX_LISTED * k
        self._name = name
        self.waits = current_device().number is not None
        """Whether the host waits for every number."""
        self._bound = 0.0 if self.waits else context.memory.get(f"{name}.bound", 0.0)
        whole = slice(0, accumulated.numel), self._bound, self.room
        [self.candidates] = accumulated.list_above(context.workspace, [whole])
        self._found = self.candidates.found
        self._counts: dict[float, int] = {}  # by threshold
        self.magnitudes: dict[int, float] = {}
        """Magnitudes of the search's ranks, of which 1 is the largest; only if it `waits`."""
        if self.waits and ranks:
            bits = accumulated.to_host(*(kernels.kth_magnitude(accumulated.array(), rank) for rank in ranks))
            magnitudes = [cpu.magnitude_of(word, accumulated.dtype) for word in bits]
            self.magnitudes = dict(zip(ranks, magnitudes, strict=True))

    @property
    def mean(self) -> float:
        """Mean magnitude."""
        return self.accumulated.moments.total / self.numel

    def top(self) -> float:
        """Return the largest magnitude; 1 has to be among the ranks that the search was made with."""
        return self.magnitudes[1] if self.waits else self.candidates.top()

    def foresee(self, thresholds: Iterable[float]) -> None:
        """Count above the first eight of the thresholds that may be needed, if numbers are waited for."""
        if self.waits:
            fitted = [self._fitted(threshold) for threshold in islice(thresholds, _MAX_FORESEEN)]
            counts = self.accumulated.to_host(*kernels.counts_above(self.accumulated.array(), fitted))
            self._counts.update(zip(fitted, map(int, counts), strict=True))

    def count(self, threshold: float, enough: int) -> int:
        """Count the elements above a threshold; any result from ``enough`` on may stand for a larger one."""
        candidates, threshold = self.candidates, self._fitted(threshold)
        if threshold in self._counts:
            return self._counts[threshold]
        if candidates.listed >= enough and cpu.magnitude_bits(threshold, self.accumulated.dtype) < candidates.bound:
            return candidates.listed
        return candidates.count(threshold)

    def above(self, threshold: float, bounded: bool = True) -> Selection:
        """Select the elements above a threshold; if ``bounded`` the k largest in place of none or over 4 k + 1024."""
        if not 0 < threshold < math.inf:
            return self.largest()
        threshold = self._fitted(threshold)
        most = max_sent(self.k) if bounded else self.numel
        count = self.count(threshold, most + 1)
        if bounded and not 0 < count <= most:
            return self.largest()
        self.remember(threshold, count)
        return self.candidates.above(threshold, count, known=True)

    def largest(self) -> Selection:
        """Select the k largest, exactly, without zeros."""
        k = min(self.k, self.accumulated.moments.nonzero)
        if k == 0:
            return Selection(current_device().empty(0, np.uint32), current_device().empty(0, self.accumulated.dtype))
        return self.exactly(k)

    def exactly(self, k: int) -> Selection:
        """Select the k largest, exactly; zeros if there are not enough others."""
        selection, bits = self.candidates.largest(k)
        if not self.waits:
            self.remember(cpu.magnitude_of(bits, self.accumulated.dtype), k)
        return selection

    def remember(self, threshold: float, count: int) -> None:
        """Keep a bound for the next step, given the threshold of this step and the number of selected elements."""
        if not 0 < threshold < math.inf:
            return
        gap = self.memory.get(f"{self._name}.gap", _FIRST_GAP)
        if self._bound > 0 and self._found < count:
            gap = min(_MAX_GAP, 2 * gap)
        elif self._found > _MANY_LISTED * count:
            gap = max(_MIN_GAP, gap / 2)
        self.memory[f"{self._name}.gap"] = gap
        self.memory[f"{self._name}.bound"] = (1 - gap) * threshold

    def _fitted(self, threshold: float) -> float:
        return min(threshold, float(np.finfo(self.accumulated.dtype).max))


@dataclass(frozen=True, repr=False)
class Estimator(Sparsifier):
    """A sparsifier that estimates the magnitude that k elements exceed, and sends the elements above it.

    To add one: derive from it and implement `threshold`. Messages stay bounded: if the estimate selects nothing or more
    than 4 k + 1024 elements, or if some element is not finite, exactly the k largest are sent. Of an array of zeros
    nothing is sent.

    Parameters
    ----------
    ratio : float
        Intended kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    """

    ranks: ClassVar[Sequence[int]] = ()
    """Ranks of the magnitudes that `threshold` reads."""

    @property
    def bounded(self) -> bool:
        """Whether the k largest are sent in place of none or too many."""
        return True

    ratio: float = 0.01

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        search = Search(self.id, accumulated, context, num_kept(self.ratio, accumulated.numel), self.ranks)
        if not accumulated.finite:
            return search.largest()
        return search.above(self.threshold(search), self.bounded)

    @abstractmethod
    def threshold(self, search: Search) -> float:
        """Estimate the magnitude that about ``search.k`` elements exceed; NaN if that is unknown."""


_MAX_CORRECTIONS = 3  # times that the threshold may be corrected in a step
_MIN_SHARE = 5e-324  # smallest share whose quantile is taken: half of the smallest ratio is 0, which has no quantile


@register
@dataclass(frozen=True, repr=False)
class GaussianK(Estimator):
    """GaussianK-SGD (arXiv 1911.08772): the threshold that a normal distribution of the elements would have.

    ::

        threshold = NormalDist().inv_cdf(1 - ratio / 2) * np.sqrt(np.mean(x**2))
        threshold *= correction  # 1/2 and 3/2, see below
        sent = np.where(abs(x) > threshold, x, 0)

    It is halved where fewer than 2 k / 3 elements exceed it and multiplied by 1.5 where more than 4 k / 3 do, at most
    three times.

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
        quantile = -NormalDist().inv_cdf(max(self.ratio / 2, _MIN_SHARE))
        threshold = quantile * math.sqrt(search.accumulated.energy / search.numel)
        more = 1.5 * threshold
        search.foresee((threshold, threshold / 2, more, threshold / 4, more / 2, 1.5 * more, threshold / 8, more / 4))
        for _ in range(_MAX_CORRECTIONS):
            count = search.count(threshold, 4 * k // 3 + 1)
            if 3 * count < 2 * k:
                threshold *= 0.5
            elif 3 * count > 4 * k:
                threshold *= 1.5
            else:
                break
        return threshold


_MIN_INTERVAL = 0.2  # width of the interval at which the binary search ends
_HALVES = (0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875)  # places that the binary search can try
_TRIMS = (0.8, 0.6, 0.4, 0.2, 0.0)  # places of the thresholds tried by trimming, from the mean (0) to the largest (1)


@register
@dataclass(frozen=True, repr=False)
class RedSync(Estimator):
    """RedSync (arXiv 1808.04357): a coarse search for the threshold ``mean + t * (largest - mean)`` of magnitudes.

    ::

        mean, largest = np.mean(abs(x)), abs(x).max()
        threshold = mean + t * (largest - mean)  # t: see ``search``
        sent = np.where(abs(x) > threshold, x, 0)

    Parameters
    ----------
    search : {"binary", "trimmed"}
        ``"binary"`` halves the interval of t, first [0, 1], until it is shorter than 0.2, and takes the last t. It ends
        sooner if more than k and fewer than 2 k elements exceed the threshold; with fewer than k / 2 it searches below,
        otherwise above. ``"trimmed"`` takes the first t of 0.8, 0.6 ... 0 above which there are k elements.

    Notes
    -----
    Different from the paper's system: the threshold is found at every step, the search does not depend on a layer's
    size, and every value travels, not one mean. Different from published code: `Estimator` bounds the number
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
        while high - low > _MIN_INTERVAL:
            place = (low + high) / 2
            count = search.count(mean + place * span, 2 * k)
            if k < count < 2 * k:
                break
            if 2 * count < k:
                high = place
            else:
                low = place
        return mean + place * span


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

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        k, numel = self.count(accumulated.numel), accumulated.numel
        search = Search("mstopk", accumulated, context, k, (1, k, min(k + 1, numel)))
        selection = self._bracketed(search, context) if accumulated.finite else None
        return search.exactly(k) if selection is None else selection

    def _bracketed(self, search: Search, context: Context) -> Selection | None:
        mean, top, k = search.mean, search.top(), search.k
        if not 0 <= mean < top:
            return None
        pool: Selection | None = None  # few elements, among which it is enough to count
        low, high, lower, upper = 0.0, 1.0, math.nan, top
        for _ in range(self.samplings):
            middle = (low + high) / 2
            threshold = mean + middle * (top - mean)
            if search.waits:  # the sign of the excess, by the magnitudes of ranks k and k + 1
                limit = search.accumulated.dtype.type(threshold)
                excess = sum(search.magnitudes[rank] > limit for rank in {k, min(k + 1, search.numel)}) - 1
            elif pool is not None:
                excess = kernels.tail_statistics(pool.values, threshold).count - k
            else:
                excess = search.count(threshold, k + 1) - k
                if 0 < excess <= search.room - k and search.candidates.listed <= k:
                    pool = search.candidates.above(threshold, k + excess)
            if excess > 0:
                low, lower = middle, threshold
                continue
            high, upper = middle, threshold
            if excess == 0:
                break
        bottom = upper if excess == 0 else lower
        if math.isnan(bottom):
            return None
        if pool is None:
            count = search.count(bottom, search.room + 1)
            if not 0 < count <= search.room:
                return None
            pool = search.candidates.above(bottom, count, known=True)
        search.remember(upper if math.isnan(lower) else lower, k)
        return _run(pool, lower, upper, k, context)


def _run(pool: Selection, lower: float, upper: float, k: int, context: Context) -> Selection:
    # All elements above the upper threshold, and a run of those between the two to make it k.
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


_MIN_SHARE_OF_K = 0.8  # times k; with fewer than that the threshold is lowered
_LOWERING = 0.8  # factor by which the threshold is lowered
_MAX_LOWERINGS = 10  # times that the threshold may be lowered in a step


@register
@dataclass(frozen=True, repr=False)
class DGC(Sparsifier):
    """Deep Gradient Compression (arXiv 1712.01887): a threshold from a sample, momentum correction, clipping, warm-up.

    ::

        sample = np.sort(abs(x[start::stride]))
        threshold = sample[-round(ratio * sample.size)]
        sent = np.where(abs(x) > threshold, x, 0)

    Where fewer than 0.8 k elements exceed the threshold, it is multiplied by 0.8, at most ten times; where more than k
    do, exactly the k largest are sent.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1] after the warm-up; k is the nearest integer to ``ratio * numel``, at least 1.
    sample : float
        Fraction of the elements in the sample, but at least ``2 / ratio`` elements. If that is every third or more, or
        the ratio is 1, the selection is exact.
    momentum, nesterov, masking, clip
        Momentum correction and factor masking, and clipping, see `Entry`. The optimizer must not apply momentum again.
    warmup_steps : int
        At step s of the warm-up, from 0 on, the ratio is ``ratio ** ((s + 1) / (warmup_steps + 1))``.

    Notes
    -----
    Different from the paper and its published code:

    - Momentum correction is off unless asked for, and clipping is by the norm of all of a rank's gradients.
    - At most k elements are sent, the largest. Published code sends the first k of up to 1.3 k candidates in the order
      of indices, so that elements at the end of an array lose whatever their size.
    - The warm-up is counted in steps; biases and other vectors are part of their bucket and compressed like the rest.
    - The sample's stride is odd, so that it does not stay within a few columns of a matrix.
    - With infinities or NaN, or with a sample of too few nonzero elements, exactly the k largest are sent. Of an array
      of zeros nothing is sent.

    Examples
    --------
    >>> compressor = DGC(ratio=0.001, warmup_steps=2)
    >>> [round(compressor.ratio_at(step), 4) for step in range(4)]
    [0.1, 0.01, 0.001, 0.001]
    """

    id: ClassVar[str] = "dgc"
    paper: ClassVar[str] = "Lin et al. 2018, arXiv 1712.01887; at most k elements, the largest; momentum off by default"

    ratio: float = 0.01
    sample: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sample", "momentum"):
            self._set(**{name: check_range("dgc", name, getattr(self, name), 0, 1)})
        for name in ("nesterov", "masking"):
            check_choice("dgc", name, getattr(self, name), (True, False))
            self._set(**{name: bool(getattr(self, name))})
        if self.clip is not None:
            self._set(clip=check_range("dgc", "clip", self.clip, 0, math.inf))
            if self.clip == 0:
                raise ConfigurationError("dgc: clip must be above 0, or None; at 0 nothing would ever be sent")
        check_least("dgc", "warmup_steps", self.warmup_steps, 0)

    @property
    def entry(self) -> Entry:
        return Entry(self.clip, self.momentum, self.nesterov, self.masking)

    def ratio_at(self, step: int) -> float:
        """Return the kept fraction of a step."""
        if step >= self.warmup_steps:
            return self.ratio
        return float(self.ratio ** ((step + 1) / (self.warmup_steps + 1)))

    def bind_to(self, bucket: BucketParameters) -> Self:
        return self if bucket.warm_up else replace(self, warmup_steps=0)

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        ratio = self.ratio_at(context.step)
        search = Search("dgc", accumulated, context, num_kept(ratio, accumulated.numel))
        size = math.ceil(max(self.sample * search.numel, min(search.numel, 2 / ratio)))
        stride = max(1, search.numel // size - 1) | 1
        if stride == 1 or search.k == search.numel:
            return search.largest()
        threshold = self._estimate(accumulated, stride, ratio, context)
        if not accumulated.finite:
            return search.largest()
        search.foresee(accumulate(repeat(_LOWERING, _MAX_LOWERINGS), mul, initial=threshold))
        count = search.count(threshold, search.k + 1)
        for _ in range(_MAX_LOWERINGS):
            if count >= _MIN_SHARE_OF_K * search.k:
                break
            threshold *= _LOWERING
            count = search.count(threshold, search.k + 1)
        return search.largest() if count > search.k else search.above(threshold)

    def _estimate(self, accumulated: Accumulated, stride: int, ratio: float, context: Context) -> float:
        start = int(context.random(shared=False).integers(stride))
        sample = accumulated.array()[start::stride]
        magnitudes = context.workspace.array("dgc.sample", sample.size, sample.dtype)
        np.abs(sample, out=magnitudes)
        [bits] = accumulated.to_host(kernels.kth_magnitude(magnitudes, num_kept(ratio, sample.size)))
        return cpu.magnitude_of(bits, sample.dtype)


_ASSUMED_SHARE = 0.01  # assumed kept fraction of a fixed threshold before the first step
_MIN_SPARE_LISTED = 1024  # elements that can be listed beyond twice those of the step before


@register
@dataclass(frozen=True, repr=False)
class Threshold(Sparsifier):
    """Every element of at least a magnitude that stays the same over training.

    ::

        sent = np.where(abs(x) >= limit, x, 0)

    More is sent when gradients are large. The size of messages follows the data, from nothing to the whole array.

    Parameters
    ----------
    limit : float
        Magnitudes of at least this are sent; 0 sends whatever is not zero. For independent gradients of standard
        deviation s an element waits about ``(limit / s)**2`` steps: ten standard deviations keep about 1 %.

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
        return num_kept(_ASSUMED_SHARE, numel)  # the fraction that the limit keeps is known only from the data

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        # Elements above the next smaller magnitude are those that reach the limit.
        below = cpu.magnitude_of(max(0, cpu.magnitude_bits(self.limit, accumulated.dtype) - 1), accumulated.dtype)
        room = context.memory.get("threshold.room", self.expected(accumulated.numel))
        whole = slice(0, accumulated.numel), below, 2 * room + _MIN_SPARE_LISTED
        [candidates] = accumulated.list_above(context.workspace, [whole])
        selection = candidates.above(below, room)
        context.memory["threshold.room"] = selection.indices.size
        return selection
