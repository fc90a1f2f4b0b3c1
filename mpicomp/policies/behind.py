"""The share of steps by which compressed training falls behind dense, from what its elements are like.

An optimizer such as Adam divides by the root of a gradient's mean square. Where an element is sent seldom, what has
been waiting comes in bursts, whose mean square is larger, so that its steps are smaller for good; and what waits at any
moment is not there yet. Both depend on the element: large and noisy ones are sent at once, small ones late. All of it
follows from that but for how much an element counts, and how much more is lost than that.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# By how much a walk of Gaussian steps overshoots a threshold, in standard deviations of a step:
# -zeta(1/2) / sqrt(2 pi); Siegmund 1979, doi:10.2307/1426855.
_OVERSHOOT = 0.5826
# Exponent of an element's scale in what it counts: 1 is the first-order gain of a step of Adam, 2 of a plain one.
_EXPONENT = 1.5
# What is lost counts more than that of elements by themselves, since what others learn is worth less without them, and
# for selections twice as much, since what was measured of them differs most: docs/policies.md has both.
_FACTOR = 2.0
_FACTOR_OF_SELECTIONS = 4.0
# Steps by which training falls behind for each local step beyond the first: measured, docs/updates.md has it.
_LOCAL = 5.0
_THRESHOLDS = 48  # that are tried, from none to one that hardly anything exceeds; shares in between are interpolated
_LOW, _HIGH = 0.1, 1e4  # times the smallest and the largest scale


def importance(scales: Array, signals: Array) -> Array:
    """Return what each element counts among all, from its scale and its share of signal."""
    counts: Array = scales**_EXPONENT * signals
    return counts


def waits(scales: Array, signals: Array, thresholds: Array) -> Array:
    """Return the steps after which what an element accumulates reaches a threshold, on average; at least 1.

    A gradient is taken to be Gaussian: a mean, which is signal, and noise around it. Their sum over steps leaves an
    interval of plus and minus h on average after ``(h / mean) tanh(h mean / variance)`` steps, with h the threshold and
    the overshoot (Wald's identity).

    Parameters
    ----------
    scales, signals : arrays
        Root mean square of each element's gradients, and the share of signal in their energy, in (0, 1].
    thresholds : array
        Broadcast against them.
    """
    means, noise = scales * np.sqrt(signals), scales * scales * (1 - signals)
    reach = thresholds + _OVERSHOOT * np.sqrt(noise)
    with np.errstate(divide="ignore", over="ignore"):
        steps: Array = np.maximum(1.0, reach / means * np.tanh(reach * means / noise))
    return steps


def behind_of_selections(
    shares: Array, scales: Array, signals: Array, ratios: Array, ranks: int, age: float, normalises: bool = True
) -> tuple[Array, Array]:
    """Return the share of steps that is lost where elements are sent once they exceed a threshold.

    Parameters
    ----------
    shares, scales, signals : arrays, shape (classes,)
        Of elements that are alike: their share of all, which need not add up to 1, the root mean square of their
        gradients on a rank, and the share of signal in their energy.
    ratios : array, shape (ratios,)
        Kept fractions: thresholds are those that keep as much.
    ranks : int
        Number of ranks, each of which has a threshold of its own.
    age : float
        Steps of training: what waits is a share of them.
    normalises : bool
        Whether an optimizer divides what arrives by the root of its mean square; else bursts cost nothing.

    Returns
    -------
    apart, together : arrays, shape (ratios,)
        In [0, 1], where each rank sends what exceeds its own threshold, and where all send the same elements at once.
        What is selected at a ratio is interpolated between thresholds.
    """
    grid = np.geomspace(_LOW * scales.min(), _HIGH * scales.max(), _THRESHOLDS)[:, None]
    steps = waits(scales, signals, grid)
    kept = np.log((shares / steps).sum(axis=1))[::-1]
    reach = grid / scales + _OVERSHOOT * np.sqrt(1 - signals)
    bursts = (reach * reach / steps + (ranks - 1) * signals) / ranks, _summed_bursts(steps, signals, ranks)
    weights = shares * importance(scales, signals)
    apart, together = (
        _lost(weights, steps, own if normalises else None, signals, ranks, age, _FACTOR_OF_SELECTIONS) for own in bursts
    )
    return np.interp(np.log(ratios), kept, apart[::-1]), np.interp(np.log(ratios), kept, together[::-1])


def behind_at_random(
    shares: Array, scales: Array, signals: Array, ratios: Array, ranks: int, age: float, normalises: bool = True
) -> Array:
    """Return the share of steps that is lost where ranks send the same elements, drawn at random.

    Parameters and what is returned are those of `behind_of_selections`.
    """
    # Times between draws vary: their mean square is that of equal ones that are nearly twice as long.
    steps = np.broadcast_to(2 / ratios[:, None] - 1, (ratios.size, scales.size))
    bursts = _summed_bursts(steps, signals, ranks) if normalises else None
    return _lost(shares * importance(scales, signals), steps, bursts, signals, ranks, age, _FACTOR_OF_SELECTIONS)


def behind_of_waiting(late: float, signal: float, ranks: int, age: float, normalises: bool = True) -> float:
    """Return the share of steps that is lost where all elements wait for some steps, and come together.

    Parameters
    ----------
    late : float
        Steps that energy waits in residuals.
    signal : float
        Share of signal in the energy of a gradient.
    ranks, age, normalises
        See `behind_of_selections`.
    """
    bursts = _summed_bursts(np.array([1 + late]), np.array([signal]), ranks)
    efficiency = 1 / np.sqrt(bursts[0] / (signal + (1 - signal) / ranks)) if normalises else 1.0
    lost = 1 - efficiency * (1 - min(1.0, late / max(age, 1.0)))
    return float(min(_FACTOR * lost, 1.0))


def behind_of_local_steps(steps: int, trained: float) -> float:
    """Return the share of steps that is lost where ranks make some by themselves from one exchange to the next.

    A rank's steps follow its own gradients, and what the others have found out comes late: a share of the steps that
    were ``trained`` so far, much at the beginning and little later.
    """
    return float(min(_LOCAL * (steps - 1) / max(trained, 1.0), 1.0))


def _summed_bursts(steps: Array, signals: Array, ranks: int) -> Array:
    """Return the mean square of a sum over ranks of what waited for some steps, per step; see `_lost`."""
    bursts: Array = steps * signals + (1 - signals) / ranks
    return bursts


def _lost(
    weights: Array, steps: Array, bursts: Array | None, signals: Array, ranks: int, age: float, factor: float
) -> Array:
    """Return the share of steps that is lost, shape (thresholds,).

    Parameters
    ----------
    weights, signals : arrays, shape (classes,)
        What a step achieves by the elements of a class, and their share of signal.
    steps, bursts : arrays, shape (thresholds, classes)
        How long an element waits, and the mean square of ranks' mean, over that of a gradient on a rank; no bursts
        where nothing is divided by it.
    factor : float
        What is lost counts as many times as that of elements by themselves.
    """
    alone = signals + (1 - signals) / ranks
    efficiency = 1.0 if bursts is None else 1 / np.sqrt(np.maximum(bursts / alone, 1.0))
    there = 1 - np.minimum(1.0, (steps - 1) / 2 / max(age, 1.0))
    lost: Array = np.minimum(factor * (1 - (weights * efficiency * there).sum(axis=1) / weights.sum()), 1.0)
    return lost


def behind_of_all(
    shares: Array,
    scales: Array,
    signals: Array,
    sent: Array,
    waiting: Array,
    ranks: int,
    age: float,
    normalises: bool = True,
) -> float:
    """Return the share of steps that is lost where all elements are sent in few bits.

    An element too small for its grid is sent as 0 for a while, and then as too large a number; one that is larger than
    the largest number of its grid waits. What has waited for t steps is ``t`` times the noise and ``t**2`` times the
    signal in energy, which tells t.

    Parameters
    ----------
    shares, scales, signals, ranks, age, normalises
        See `behind_of_selections`.
    sent, waiting : arrays, shape (classes,)
        Energy that a step sends of each class, and that waits in residuals, over that of a gradient.
    """
    noise = 1 - signals
    late = (np.sqrt(noise * noise + 4 * signals * waiting) - noise) / (2 * signals)
    bursts = (sent + (ranks - 1) * signals) / ranks if normalises else None
    [lost] = _lost(shares * importance(scales, signals), 1 + 2 * late[None], bursts, signals, ranks, age, _FACTOR)
    return float(lost)
