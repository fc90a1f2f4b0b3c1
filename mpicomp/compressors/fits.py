"""Thresholds from fitted distributions: which magnitude a given share of an array exceeds.

SIDCo (Abdelmoniem, Elzanaty, Alouini, Canini, MLSys 2021, arXiv 2101.10761), sections on single-stage thresholds and on
peaks over a threshold. Everything here is arithmetic on a few float64 numbers.
"""

import math
from collections.abc import Sequence

from mpicomp.kernels import cpu

DISTRIBUTIONS = ("exponential", "gamma", "pareto")


def whole_threshold(
    distribution: str, moments: cpu.Moments, logarithms: tuple[int, float, float] | None, share: float
) -> float:
    """Fit all magnitudes that are not zero and return the one that a share of them exceeds.

    Parameters
    ----------
    distribution : {"exponential", "gamma", "pareto"}
        Of the magnitudes; generalised Pareto with location 0 in the last case.
    moments : Moments
        Of the array.
    logarithms : tuple or None
        What `mpicomp.kernels.cpu.logarithms` gave for it or for a sample; needed for gamma only.
    share : float
        In (0, 1).

    Returns
    -------
    float
        The threshold, at least 0 and never NaN for finite moments. Magnitudes that are all the same (no
        variance) get an exponential fit.

    Examples
    --------
    >>> from mpicomp.kernels.cpu import Moments
    >>> moments = Moments(nonzero=1000, total=1000.0, energy=2000.0, finite=True)
    >>> round(whole_threshold("exponential", moments, None, 0.001), 4)
    6.9078
    >>> round(whole_threshold("pareto", moments, None, 0.001), 4)
    6.9078
    """
    mean = moments.total / moments.nonzero
    variance = moments.energy / moments.nonzero - mean * mean
    if distribution == "gamma" and logarithms is not None and logarithms[0] > 0:
        seen, total, logarithm = logarithms
        return _gamma(total / seen, logarithm / seen, share)
    if distribution == "pareto":
        return _pareto(mean, variance, share)
    return _exponential(mean, share)


def excess_threshold(distribution: str, tail: cpu.Tail, threshold: float, share: float) -> float:
    """Fit a distribution to the elements above a threshold, and return the magnitude that a share of them exceeds.

    Parameters
    ----------
    distribution : {"exponential", "gamma", "pareto"}
        That of the first stage: after an exponential one excesses are exponential, otherwise generalised Pareto.
    tail : Tail
        What exceeds ``threshold``; at least one element.
    threshold : float
        Where the excesses begin.
    share : float
        Above 0; above 1 it asks for more than there are, and the fit is continued below the threshold.
    """
    mean = tail.excess / tail.count
    variance = tail.squares / tail.count - mean * mean
    over = _exponential(mean, share) if distribution == "exponential" else _pareto(mean, variance, share)
    return max(0.0, threshold + over)


def interpolated(points: Sequence[tuple[float, int]], wanted: float) -> float | None:
    """Return a threshold between one that too many elements exceed and one that too few do.

    Counts are taken to fall exponentially in between. Under error feedback they fall slowly and then, where the
    threshold of the step before was, all at once: to get there, a look at the middle takes turns with that.

    Parameters
    ----------
    points : sequence of (float, int)
        Thresholds and how many elements exceed them, in the order in which they were tried.
    wanted : float
        How many should.

    Returns
    -------
    float or None
        None where all thresholds were too low, or all too high.

    Examples
    --------
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
