"""Sparsifiers with a threshold: estimated from a distribution, a search, a bisection or a sample, or fixed."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import Entry, num_kept
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


def max_sent(k: int) -> int:
    """Return how many elements are ever sent where k are wanted."""
    return _MAX_FACTOR * k + _SLACK


class Search:
    """Count and select the elements above a threshold, for a compressor that is to send k of them.

    On the host elements are listed in the sweep that computes the sum, by a bound from the step before; counts and
    selections never depend on it. ``name`` is the bound's key in the memory.
    """

    def __init__(self, name: str, accumulated: Accumulated, context: Context, k: int) -> None:
        self.accumulated, self.k, self.memory = accumulated, k, context.memory
        self.numel = accumulated.numel
        self._name = name
        self._lists = current_device().number is None
        self._bound = context.memory.get(f"{name}.bound", 0.0) if self._lists else 0.0
        whole = slice(0, accumulated.numel), self._bound, _MAX_LISTED * k
        [self.candidates] = accumulated.list_above(context.workspace, [whole])
        self._found = self.candidates.found

    @property
    def mean(self) -> float:
        """Mean magnitude."""
        return self.accumulated.moments.total / self.numel

    def count(self, threshold: float, enough: int) -> int:
        """Count the elements above a threshold; any result from ``enough`` on may stand for a larger one."""
        candidates, threshold = self.candidates, self._fitted(threshold)
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
        if self._lists:
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

    @property
    def bounded(self) -> bool:
        """Whether the k largest are sent in place of none or too many."""
        return True

    ratio: float = 0.01

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        search = Search(self.id, accumulated, context, num_kept(self.ratio, accumulated.numel))
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

    search: str = "binary"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("redsync", "search", self.search, ("binary", "trimmed"))

    def threshold(self, search: Search) -> float:
        mean, span = search.mean, search.candidates.top() - search.mean
        if not 0 < span < float("inf"):
            return float("nan")
        k, place = search.k, 0.0
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
    it (fewer exceed the mean, or all magnitudes are equal), if more than 4 k are above the lower one, and if there are
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
        k = self.count(accumulated.numel)
        search = Search("mstopk", accumulated, context, k)
        selection = self._bracketed(search, context) if accumulated.finite else None
        return search.exactly(k) if selection is None else selection

    def _bracketed(self, search: Search, context: Context) -> Selection | None:
        mean, top, k = search.mean, search.candidates.top(), search.k
        if not 0 <= mean < top:
            return None
        low, high, lower, upper = 0.0, 1.0, math.nan, top
        for _ in range(self.samplings):
            middle = (low + high) / 2
            threshold = mean + middle * (top - mean)
            count = search.count(threshold, k + 1)
            if count > k:
                low, lower = middle, threshold
                continue
            high, upper = middle, threshold
            if count == k:
                lower = upper
                break
        count = 0 if math.isnan(lower) else search.count(lower, _MAX_LISTED * k + 1)
        if not 0 < count <= _MAX_LISTED * k:
            return None
        search.remember(lower, k)
        pool = search.candidates.above(lower, count, known=True)
        magnitudes = np.abs(pool.values)
        chosen = magnitudes > magnitudes.dtype.type(upper)
        [above] = to_python(np.count_nonzero(chosen))
        missing = k - above
        if missing:
            between = ~chosen
            start = int(context.random(shared=False).integers(count - k + 1))
            place = np.cumsum(between)
            chosen |= between & (place > start) & (place <= start + missing)
        return Selection(pool.indices[chosen], pool.values[chosen])


_MIN_SHARE_OF_K = 0.8  # times k; with fewer than that the threshold is lowered
_LOWERING = 0.8  # factor by which the threshold is lowered
_MAX_LOWERINGS = 10  # times that the threshold may be lowered in a step


@register
@dataclass(frozen=True, repr=False)
class DGC(Sparsifier):
    """Deep Gradient Compression (arXiv 1712.01887): a threshold from a sample, momentum correction, clipping.

    ::

        sample = np.sort(abs(x[start::stride]))
        threshold = sample[-round(ratio * sample.size)]
        sent = np.where(abs(x) > threshold, x, 0)

    Where fewer than 0.8 k elements exceed the threshold, it is multiplied by 0.8, at most ten times; where more than k
    do, exactly the k largest are sent.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    sample : float
        Fraction of the elements in the sample, but at least ``2 / ratio`` elements. If that is every third or more, or
        the ratio is 1, the selection is exact.
    momentum, nesterov, masking, clip
        Momentum correction and factor masking, and clipping, see `Entry`. The optimizer must not apply momentum again.

    Notes
    -----
    Different from the paper and its published code:

    - Momentum correction is off unless asked for, and clipping is by the norm of all of a rank's gradients.
    - At most k elements are sent, the largest. Published code sends the first k of up to 1.3 k candidates in the order
      of indices, so that elements at the end of an array lose whatever their size.
    - The warm-up is that of every compressor, ``warmup="ramp:N"``; biases and other vectors are part of their bucket.
    - The sample's stride is odd, so that it does not stay within a few columns of a matrix.
    - With infinities or NaN, or with a sample of too few nonzero elements, exactly the k largest are sent. Of an array
      of zeros nothing is sent.
    """

    id: ClassVar[str] = "dgc"
    paper: ClassVar[str] = "Lin et al. 2018, arXiv 1712.01887; at most k elements, the largest; momentum off by default"

    ratio: float = 0.01
    sample: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None

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

    @property
    def entry(self) -> Entry:
        return Entry(self.clip, self.momentum, self.nesterov, self.masking)

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        search = Search("dgc", accumulated, context, num_kept(self.ratio, accumulated.numel))
        size = math.ceil(max(self.sample * search.numel, min(search.numel, 2 / self.ratio)))
        stride = max(1, search.numel // size - 1) | 1
        if stride == 1 or search.k == search.numel:
            return search.largest()
        start = int(context.random(shared=False).integers(stride))
        sample = accumulated.array()[start::stride]
        magnitudes = context.workspace.array("dgc.sample", sample.size, sample.dtype)
        np.abs(sample, out=magnitudes)
        [bits] = accumulated.to_host(kernels.kth_magnitude(magnitudes, num_kept(self.ratio, sample.size)))
        threshold = cpu.magnitude_of(bits, sample.dtype)
        if not accumulated.finite:
            return search.largest()
        count = search.count(threshold, search.k + 1)
        for _ in range(_MAX_LOWERINGS):
            if count >= _MIN_SHARE_OF_K * search.k:
                break
            threshold *= _LOWERING
            count = search.count(threshold, search.k + 1)
        return search.largest() if count > search.k else search.above(threshold)


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
