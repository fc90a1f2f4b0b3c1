"""Medians of samples of unknown distribution, with confidence intervals."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrik

INTERVAL_SAMPLES = 6  # samples below which there is no 95 % interval of their median

_RESAMPLED = 2000  # samples of the bootstrap
_NARROW = 0.05  # share of the median by which either end of its interval may be away


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median by ranks; None where there are too few samples for one.

    >>> median_interval([float(number) for number in range(1, 31)]), median_interval([1.0] * 5)
    ((10.0, 21.0), None)
    """
    if len(samples) < INTERVAL_SAMPLES:
        return None
    below = int(bdtrik(0.025, len(samples), 0.5))  # how many samples lie below the interval, and as many above it
    ordered = np.sort(samples)
    return float(ordered[below]), float(ordered[-1 - below])


def is_narrow(samples: Sequence[float]) -> bool:
    """Return whether both ends of the median's interval are within 5 % of it.

    >>> is_narrow([1.0, 1.01] * 10), is_narrow([1.0, 1.2] * 10), is_narrow([1.0] * 5)
    (True, False, False)
    """
    interval = median_interval(samples)
    if interval is None:
        return False
    median = float(np.median(samples))
    return max(interval[1] - median, median - interval[0]) <= _NARROW * median


def ratio_interval(samples: ArrayLike, others: ArrayLike) -> tuple[float, float] | None:
    """Return the `block_interval` of a median over another one's, of samples that were taken in turn.

    >>> ratio_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0])
    (0.5, 0.5)
    """
    pair = np.asarray(samples), np.asarray(others)
    return block_interval(lambda upper, lower: np.median(upper, axis=1) / np.median(lower, axis=1), *pair)


def block_interval(
    value: Callable[..., NDArray[np.float64]], *samples: NDArray[np.float64]
) -> tuple[float, float] | None:
    """Return the 95 % interval of a statistic of samples that were taken block by block, in turn; None of few blocks.

    By bootstrap: whole blocks are drawn with repetition, the same ones of all samples. Steps of a block resemble
    each other, and noise common to all blocks of a round cancels. The statistic is one of each row.
    """
    number = len(samples[0])
    if number < INTERVAL_SAMPLES:
        return None
    drawn = np.random.default_rng(0).integers(number, size=(_RESAMPLED, number))
    values = value(*(sample[drawn].reshape(_RESAMPLED, -1) for sample in samples))
    if not np.isfinite(values).all():
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
