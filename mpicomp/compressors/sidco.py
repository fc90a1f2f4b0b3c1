"""SIDCo: the threshold of top-k, estimated from a distribution fitted in stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import PackedSelection
from mpicomp.compressors.thresholds import Estimator, Search, max_sent
from mpicomp.compressors.topk import bounds_for, scratch_for
from mpicomp.compressors.wire import STALE, Selection, Wire, capacity_bytes, message_to_fill
from mpicomp.errors import ConfigurationError
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_flag

DISTRIBUTIONS = ("exponential", "gamma", "pareto")
_FIRST_SHARE = 0.25  # share of elements that the first of several stages leaves
_ADAPT_STEPS = 5  # steps between two adjustments of the number of stages
_MAX_MISS = 0.2  # share by which the reached ratio may miss the one that is asked for
_MIN_SURVIVORS = 10  # survivors; fewer are not worth another fit
_MAX_CORRECTIONS = 6  # stages that a step may add where its estimate misses
_MIN_NUMEL = 2048  # elements; below, an exact selection is cheaper than an estimate is good
_SAMPLE_NUMEL = 1 << 21  # elements that are enough for a fit: thresholds come from every n-th group of a larger array


@register
@dataclass(frozen=True, repr=False)
class SIDCo(Estimator):
    """Everything above a threshold that is estimated from fitted distributions, so that about k elements are sent.

    ::

        threshold = -np.mean(abs(x)) * np.log(0.25)  # exponential; then for each further stage
        excess = abs(x)[abs(x) > threshold] - threshold
        threshold -= np.mean(excess) * np.log((k / excess.size) ** (1 / stages_left))

    The first stage fits all magnitudes and keeps a quarter; every later stage fits the excess over the threshold
    before. Every 5 steps the number of stages changes by one if the elements selected by the stages, averaged over the
    steps, miss k by more than 20 %: in the direction of the last change if that helped, otherwise in the other one.
    Where a step's last stage misses k by more than 10 %, up to 6 corrections follow in the same step.

    Parameters
    ----------
    ratio : float
        Intended kept fraction in (0, 1].
    distribution : {"exponential", "gamma", "pareto"}
        Of the first stage. Later stages are exponential after an exponential one, otherwise generalised Pareto.
    stages : int or None
        None adapts it; a number fixes it.
    corrections : bool
        False is the paper's estimator, to compare with, but for the exact quantile, and the exact top-k of few
        elements and of failed estimates.
    published : bool
        Whether every estimate is used, even if it selects nothing or far too much. `as_published` sets it.

    Notes
    -----
    Corrections are new: under error feedback elements crowd below the threshold of the step before, which no
    distribution fits. Of more than 2,097,152 elements every n-th group of 1024 is read. Fewer than 2,048 elements, and
    an estimate that `Estimator` refuses, give an exact top-k. docs/papers.md has all that differs from the paper.
    """

    id: ClassVar[str] = "sidco"
    paper: ClassVar[str] = (
        "SIDCo, Abdelmoniem et al. 2021, arXiv 2101.10761; stages aim at counted survivors, stages adapt by climbing, "
        "exact top-k where an estimate fails"
    )

    gpu_sources: ClassVar[Sequence[str]] = ("accumulate", "sidco", "select", "message", "indices", "scatter")

    distribution: str = "exponential"
    stages: int | None = None
    corrections: bool = field(default=True, kw_only=True)
    published: bool = field(default=False, kw_only=True)

    @classmethod
    def as_published(cls, **settings: Any) -> Self:
        """Return the paper's SIDCo, except for ``settings``."""
        return cls.from_config({"published": True, "corrections": False} | settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("sidco", "published", self.published)
        check_choice("sidco", "distribution", self.distribution, DISTRIBUTIONS)
        if self.stages is not None and (not isinstance(self.stages, int) or not 1 <= self.stages <= 64):
            raise ConfigurationError(f"sidco: stages must be None or a number from 1 to 64, got {self.stages!r}")
        check_flag("sidco", "corrections", self.corrections)

    @property
    def bounded(self) -> bool:
        return self.corrections or not self.published

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        found = self._fused(accumulated, context, False)
        if found is None:
            return super().select(accumulated, context)
        assert found.uncounted is not None
        *numbers, counted = found.uncounted
        count, reached = accumulated.to_host(*numbers)
        counted(reached)
        return Selection(found.indices[:count], found.values[:count])

    def select_packed(self, accumulated: Accumulated, context: Context) -> PackedSelection | None:
        return None if self.wire is not None else self._fused(accumulated, context, True)

    def _fused(self, accumulated: Accumulated, context: Context, packs: bool) -> PackedSelection | None:
        if not self.corrections or self.distribution == "gamma" or accumulated.is_computed:
            return None
        if not hasattr(accumulated.kernels, "sidco"):
            return None
        memory, workspace, kernels = context.memory, context.workspace, accumulated.kernels
        k = num_kept(self.ratio, accumulated.numel)
        stages = self.stages or memory.setdefault("sidco.stages", _start(self.ratio))
        room = min(accumulated.numel, max_sent(k))
        indices = workspace.array("sidco.indices", room, np.uint32)
        count = workspace.array("sidco.count", 1, np.int64)
        numel, dtype, message, form = accumulated.numel, accumulated.dtype, None, ()
        if packs:
            longest = Wire(indices="plain" if self.indices == "auto" else self.indices)
            nbytes, flags = capacity_bytes(room, numel, dtype, longest), STALE * accumulated.stale
            message, values, form = message_to_fill(workspace, nbytes, room, dtype, self.indices, flags)
        else:
            values = workspace.array("sidco.values", room, dtype)
        output = kernels.Output(indices, values, count, kernels.Message(*form))
        bound, following = bounds_for(context, "sidco.candidates")
        scratch = scratch_for(accumulated, context, k)
        made = accumulated.fused(
            lambda *arrays: kernels.sidco(*arrays, k, self.distribution, stages, bound, output, scratch, following)
        )

        def counted(reached: float) -> None:
            if self.stages is None and not math.isnan(reached):
                _adapt(memory, reached, self.ratio)

        return PackedSelection(indices, values, message, (count[0], made.reached, counted))

    def threshold(self, search: Search) -> float:
        moments, memory = search.accumulated.moments, search.memory
        if not 0 < moments.energy < math.inf:
            return math.nan
        if self.bounded and (search.numel < _MIN_NUMEL or search.k >= moments.nonzero):
            return math.nan
        first = _start(self.ratio) if self.corrections else 1
        threshold, reached = self._estimate(search, self.stages or memory.setdefault("sidco.stages", first))
        if self.stages is None:
            _adapt(memory, reached, self.ratio, climbs=self.corrections)
        return threshold

    def _estimate(self, search: Search, stages: int) -> tuple[float, float]:
        # The threshold, and the number of elements that the stages select without corrections, over k.
        moments, candidates, corrects = search.accumulated.moments, search.candidates, self.corrections
        stride = max(1, search.numel // _SAMPLE_NUMEL) if corrects else 1
        wanted = search.k * _seen(search.numel, stride) / search.numel
        fitted = moments if corrects else moments._replace(nonzero=search.numel)  # the paper fits zeros too
        logarithms = None
        if self.distribution == "gamma":
            logarithms = tuple(to_python(*candidates.kernels.logarithms(candidates.array, stride, candidates.threads)))
        share = search.k / fitted.nonzero
        later = stages - 1 if share < _FIRST_SHARE else 0
        threshold = whole_threshold(self.distribution, fitted, logarithms, _FIRST_SHARE if later else share)
        tail = candidates.tail(threshold, stride)
        points = [(threshold, tail.count)]
        for left in range(later, 0, -1):
            if tail.count < (_MIN_SURVIVORS if self.bounded or corrects else 1):
                break
            part = (wanted / tail.count) ** (1 / left) if corrects else (share / _FIRST_SHARE) ** (1 / later)
            threshold = excess_threshold(self.distribution, tail, threshold, part)
            tail = candidates.tail(threshold, stride)
            points.append((threshold, tail.count))
        reached = tail.count / wanted
        for _ in range(_MAX_CORRECTIONS if corrects else 0):
            if abs(tail.count / wanted - 1) <= _MAX_MISS / 2:
                break
            between = interpolated(points, wanted)
            if between is not None:
                threshold = between
            elif tail.count >= _MIN_SURVIVORS:
                threshold = excess_threshold(self.distribution, tail, threshold, wanted / tail.count)
            else:
                break
            tail = candidates.tail(threshold, stride)
            points.append((threshold, tail.count))
        return threshold, reached


def _start(ratio: float) -> int:
    return 1 if ratio >= _FIRST_SHARE else 2 if ratio >= 0.05 else 3


def _seen(numel: int, stride: int) -> int:
    whole, rest = divmod(numel, 1024 * stride)  # of each of which the first 1024 are read
    return whole * 1024 + min(rest, 1024)


def _adapt(memory: dict[str, Any], reached: float, ratio: float, climbs: bool = True) -> None:
    # Every few steps, if the mean of ``reached`` (selected / k) is too far from 1.
    memory["sidco.sum"] = memory.get("sidco.sum", 0.0) + reached
    memory["sidco.steps"] = memory.get("sidco.steps", 0) + 1
    if memory["sidco.steps"] < _ADAPT_STEPS:
        return
    mean = memory["sidco.sum"] / memory["sidco.steps"]
    miss = abs(mean - 1)
    memory["sidco.sum"], memory["sidco.steps"] = 0.0, 0
    before = memory.pop("sidco.miss", math.inf)
    if miss <= _MAX_MISS:
        return
    most = max(1, math.ceil(math.log2(1 / ratio)))
    if not climbs:
        memory["sidco.stages"] = min(max(memory["sidco.stages"] + (-1 if mean > 1 else 1), 1), most)
        return
    direction = memory.get("sidco.direction", 1)
    if miss > before:
        direction = -direction
    if not 1 <= memory["sidco.stages"] + direction <= most:  # at an end
        direction = -direction
    memory["sidco.stages"] = min(max(memory["sidco.stages"] + direction, 1), most)
    memory["sidco.direction"], memory["sidco.miss"] = direction, miss


def whole_threshold(
    distribution: str, moments: cpu.Moments, logarithms: tuple[int, float, float] | None, share: float
) -> float:
    """Fit all magnitudes that are not zero, and return the threshold that a share of them exceeds; never NaN."""
    mean = moments.total / moments.nonzero
    variance = moments.energy / moments.nonzero - mean * mean
    if distribution == "gamma" and logarithms is not None and logarithms[0] > 0:
        seen, total, logarithm = logarithms
        return _gamma(total / seen, logarithm / seen, share)
    if distribution == "pareto":
        return _pareto(mean, variance, share)
    return _exponential(mean, share)


def excess_threshold(distribution: str, tail: cpu.TailStatistics, threshold: float, share: float) -> float:
    """Fit the excess over a threshold, and return the one that a share of them exceeds; above 1 it is lower."""
    mean = tail.excess / tail.count
    variance = tail.squares / tail.count - mean * mean
    over = _exponential(mean, share) if distribution == "exponential" else _pareto(mean, variance, share)
    return max(0.0, threshold + over)


def interpolated(points: Sequence[tuple[float, int]], wanted: float) -> float | None:
    """Return a threshold between one that too many elements exceed and one that too few do; None without both.

    ``points`` are thresholds and counts in the order in which they were tried. Counts are taken to fall exponentially
    in between. Under error feedback they fall slowly and then, at the threshold of the step before, all at once: every
    other time the result is nearer to the middle.

    >>> round(interpolated([(1.0, 100), (3.0, 1)], 10), 3)
    2.0
    """
    low = max(((t, count) for t, count in points if count >= wanted), default=None)
    high = min(((t, count) for t, count in points if count < wanted), default=None)
    if low is None or high is None or not low[0] < high[0]:
        return None
    part = math.log(low[1] / wanted) / math.log(low[1] / max(high[1], 0.5))
    if len(points) % 2:
        part = 0.5 * (part + 0.5)
    return low[0] + (high[0] - low[0]) * min(max(part, 0.05), 0.95)


def _exponential(mean: float, share: float) -> float:
    return -mean * math.log(share)


def _pareto(mean: float, variance: float, share: float) -> float:
    if not variance > 1e-6 * mean * mean:  # of equal excesses rounding leaves some
        return _exponential(mean, share)
    relative = mean * mean / variance
    shape = 0.5 * (1 - relative)
    scale = 0.5 * mean * (relative + 1)
    depth = -math.log(share)
    if abs(shape * depth) < 1e-9:
        return scale * depth
    return scale * math.expm1(min(shape * depth, 700.0)) / shape


def _gamma(mean: float, mean_logarithm: float, share: float) -> float:
    from scipy.special import gammainccinv  # takes longer to load than all of mpicomp

    spread = math.log(mean) - mean_logarithm  # at least 0; 0 where all magnitudes are the same
    if not spread > 1e-9:
        return _exponential(mean, share)
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    return mean / shape * float(gammainccinv(shape, share))
