"""SIDCo's thresholds from fitted distributions (arXiv 2101.10761): arithmetic on a few float64 numbers."""

import math
from collections.abc import Sequence

from mpicomp.kernels import cpu

DISTRIBUTIONS = ("exponential", "gamma", "pareto")


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


def excess_threshold(distribution: str, tail: cpu.Tail, threshold: float, share: float) -> float:
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
