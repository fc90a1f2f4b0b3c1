"""The cost model's arithmetic, compiled: it runs at every step, for every bucket.

Unlike the kernels for gradients it keeps the order of operations as it is written: all ranks have to come to the same
numbers.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.cache import cached

Function = TypeVar("Function", bound=Callable[..., Any])
Array = NDArray[Any]

_SURE = 3.0  # standard deviations by which a single measurement can be off at most


def compiled(function: Function) -> Function:
    """Compile with Numba, kept on disk, with nothing reordered."""
    made: Function = numba.njit(nogil=True)(function)
    return cached(made)


@compiled
def units(state: Array, link_of: Array, out: Array) -> None:
    """Write the seconds of a unit of each term: its link's times its factor's."""
    links = state.size - link_of.size
    for term in range(link_of.size):
        out[term] = math.exp(state[link_of[term]] + state[links + term])


@compiled
def grow(variance: Array, links: int, link_drift: float, link_most: float, drift: float, most: float) -> None:
    """Increase variances by a step's drift, up to a limit for links and one for factors."""
    for place in range(variance.shape[0]):
        own = variance[place, place]
        if place < links:
            variance[place, place] = max(own, min(own + link_drift, link_most))
        else:
            variance[place, place] = max(own, min(own + drift, most))


@compiled
def _spread(variance: Array, slope: Array, out: Array) -> float:
    """Write how a state's covariance is met by a measurement's slope, and return the measurement's variance by it."""
    whole = 0.0
    for row in range(slope.size):
        total = 0.0
        for column in range(slope.size):
            total += variance[row, column] * slope[column]
        out[row] = total
        whole += total * slope[row]
    return whole


@compiled
def update(
    coefficients: Array,
    unit: Array,
    link_of: Array,
    state: Array,
    variance: Array,
    seconds: float,
    noise: float,
    rough: float,
    own_error: float,
    own_variance: float,
    added_s: float,
    suspected: int,
    patience: int,
    strange: float,
    least_strange: float,
) -> tuple[float, float, float, int, bool]:
    """Update an extended Kalman filter with a measurement, in place.

    Parameters
    ----------
    coefficients, unit, link_of : arrays, shape (terms,)
        Of the plan; seconds of a unit; the link that each term belongs to.
    state, variance : arrays, shape (links + terms,) and square
        Logarithms of links and factors, and their covariance.
    seconds, noise, rough, own_error, own_variance, added_s
        See `mpicomp.cost.network.Network.observe`.
    suspected : int
        How many strange measurements came just before, negative where they were too short.
    patience : int
        How many have to be strange in the same way before links are taken to be others.
    strange, least_strange : float
        From how many standard deviations on, and at least what, a measurement is strange.

    Returns
    -------
    innovation, slope, variance : float
        See `mpicomp.cost.network.Network.observe`; infinite variance where nothing was learnt.
    suspected : int
        For the next measurement.
    changed : bool
        Whether links were found to be others.
    """
    terms = link_of.size
    links = state.size - terms
    predicted = 0.0
    for term in range(terms):
        predicted += coefficients[term] * unit[term]
    if predicted <= 0:
        return 0.0, 1.0, math.inf, suspected, False
    own = predicted * math.exp(own_error)
    part = own / (own + added_s)
    slope = np.zeros(state.size)
    for term in range(terms):
        share = part * coefficients[term] * unit[term] / predicted
        slope[links + term] = share
        slope[link_of[term]] += share
    share = seconds / (own + added_s)
    far = math.log(max(share, 0.02))
    spread = np.zeros(state.size)
    known = _spread(variance, slope, spread) + part * part * own_variance
    changed = abs(far) > max(strange * math.sqrt(known + rough), least_strange)
    if changed:
        sign = 1 if far > 0 else -1
        suspected = suspected + sign if suspected * sign > 0 else sign
        if abs(suspected) < patience:
            return 0.0, part, math.inf, suspected, False
        for link in range(links):
            variance[link, link] += far * far
        known = _spread(variance, slope, spread) + part * part * own_variance
    innovation, expected = far, known + rough
    if not changed and noise > known:
        # Seconds that are a small difference of large ones: logarithms of such have a mean that leads astray. To the
        # first order the share is as good.
        expected = known + noise
        most = _SURE * math.sqrt(expected)
        innovation = max(-most, min(most, share - 1))
    for row in range(state.size):
        state[row] += spread[row] * innovation / expected
        for column in range(state.size):
            variance[row, column] -= spread[row] * spread[column] / expected
    return innovation, part, expected, 0, changed


@compiled
def outlook(
    coefficients: Array,
    unit: Array,
    factor_variance: Array,
    alone: Array,
    speeds: Array,
    kernels: Array,
    rounds: Array,
    speed_of: Array,
    kernel_of: Array,
    round_of: Array,
    step: int,
    ageing: float,
    most: float,
    added_s: float,
    out: Array,
) -> None:
    """Predict plans.

    Parameters
    ----------
    coefficients : array, shape (plans, terms)
        Of the plans.
    unit, factor_variance : arrays, shape (terms,)
        Seconds of a unit, and the variance of the factor's logarithm.
    alone : array, shape (plans,)
        Logarithm of the seconds of own work alone.
    speeds, kernels, rounds : arrays, shape (.., 3)
        Error, its variance, and the step at which it was last learnt, a row for each compressor, kind of own work
        and kind of rounds.
    speed_of, kernel_of, round_of : arrays, shape (plans,)
        Rows of the plans in them.
    step : int
        Now.
    ageing, most : float
        Variance that each step adds to what is not learnt, and the largest standard deviation.
    added_s : float
        Seconds that contention adds to every plan.
    out : array, shape (3, plans)
        Receives seconds of own work, seconds in rounds, and the standard deviation of the logarithm of their sum.
    """
    for plan in range(coefficients.shape[0]):
        predicted, uncertain = 0.0, 0.0
        for term in range(unit.size):
            predicted += coefficients[plan, term] * unit[term]
        for term in range(unit.size):
            if coefficients[plan, term] != 0:  # most are: a plan consists of a few operations
                share = coefficients[plan, term] * unit[term] / max(predicted, 1e-12)
                uncertain += share * share * factor_variance[term]
        speed, kernel, round_ = speeds[speed_of[plan]], kernels[kernel_of[plan]], rounds[round_of[plan]]
        own = math.exp(alone[plan] + speed[0] + kernel[0])
        predicted *= math.exp(round_[0])
        whole = own + predicted + added_s
        uncertain += round_[1] + ageing * (step - round_[2])
        uncertain *= (predicted / whole) ** 2
        spread = uncertain + (own / whole) ** 2 * (kernel[1] + ageing * (step - kernel[2]))
        out[0, plan] = own
        out[1, plan] = predicted + added_s
        out[2, plan] = min(math.sqrt(spread), most)


@compiled
def choose(out: Array, too_slow: float, among: Array) -> tuple[int, int]:
    """Return the plan that is predicted to be the fastest, and the one that may be for all that is known.

    Parameters
    ----------
    out : array, shape (3, plans)
        From `outlook`.
    too_slow : float
        Times the least seconds from which on a plan is not the second one.
    among : array of int64
        The plans that are looked at.
    """
    best, least = among[0], math.inf
    for plan in among:
        seconds = out[0, plan] + out[1, plan]
        if seconds < least:
            best, least = plan, seconds
    hopeful, lowest = best, math.inf
    for plan in among:
        seconds = out[0, plan] + out[1, plan]
        if seconds <= too_slow * least and seconds * math.exp(-out[2, plan]) < lowest:
            hopeful, lowest = plan, seconds * math.exp(-out[2, plan])
    return best, hopeful
