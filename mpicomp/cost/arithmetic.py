"""The cost model's arithmetic, compiled: it runs for every bucket of a step that is learned from.

Unlike the kernels for gradients it keeps the order of operations as written: all ranks have to get the same numbers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.cache import cached

Function = TypeVar("Function", bound=Callable[..., Any])
Array = NDArray[Any]

_MAX_INNOVATION_SD = 3.0  # standard deviations by which a single measurement counts as off at most
_MIN_SHARE = 0.02  # measured over predicted seconds; a smaller ratio counts as this


def compiled(function: Function) -> Function:
    """Compile with Numba, cached on disk, with nothing reordered."""
    made: Function = numba.njit(no_cfunc_wrapper=True, nogil=True)(function)
    return cached(made)


@compiled
def unit_seconds(state: Array, link_of: Array, out: Array) -> None:
    """Write the seconds of a unit of each term: exp(link) exp(factor)."""
    links = state.size - link_of.size
    for term in range(link_of.size):
        out[term] = math.exp(state[link_of[term]] + state[links + term])


@compiled
def add_process_noise(
    covariance: Array, links: int, link_drift: float, link_limit: float, factor_drift: float, factor_limit: float
) -> None:
    """Add a step's drift to the variances, up to one limit for links and one for factors."""
    for row in range(covariance.shape[0]):
        variance = covariance[row, row]
        if row < links:
            covariance[row, row] = max(variance, min(variance + link_drift, link_limit))
        else:
            covariance[row, row] = max(variance, min(variance + factor_drift, factor_limit))


@compiled
def _project(covariance: Array, slope: Array, out: Array) -> float:
    variance = 0.0
    for row in range(slope.size):
        total = 0.0
        for column in range(slope.size):
            total += covariance[row, column] * slope[column]
        out[row] = total
        variance += total * slope[row]
    return variance


class Filter(NamedTuple):
    """State of an extended Kalman filter of links and factors."""

    unit: Array  # seconds of a unit of each term
    link_of: Array  # the link of each term
    state: Array
    covariance: Array


class Measurement(NamedTuple):
    """A plan's measured seconds in rounds; see `Network.observe`."""

    seconds: float
    noise: float
    relative_noise: float
    plan_error: float
    plan_variance: float
    added_s: float


@compiled
def update(
    coefficients: Array, network: Filter, measured: Measurement, suspected: int, patience: int, outlier_sd: float,
    min_outlier: float,
) -> tuple[float, float, float, int, bool]:  # fmt: skip
    """Update an extended Kalman filter with a measurement, in place.

    ``suspected`` counts the outliers just before, negative if they were too short: from ``patience`` of one sign on
    the links count as changed. A measurement is an outlier from ``outlier_sd`` standard deviations on, and from a
    difference of logarithms of ``min_outlier``. Return the innovation, the slope, the innovation's variance (infinite
    if nothing was learned), ``suspected`` for the next update, and whether the links count as changed.
    """
    unit, link_of, state, covariance = network
    seconds, noise, relative_noise, plan_error, plan_variance, added_s = measured
    terms = link_of.size
    links = state.size - terms
    predicted = 0.0
    for term in range(terms):
        predicted += coefficients[term] * unit[term]
    if predicted <= 0:
        return 0.0, 1.0, math.inf, suspected, False
    corrected = predicted * math.exp(plan_error)
    part = corrected / (corrected + added_s)
    slope = np.zeros(state.size)
    for term in range(terms):
        share = part * coefficients[term] * unit[term] / predicted
        slope[links + term] = share
        slope[link_of[term]] += share
    ratio = seconds / (corrected + added_s)
    log_ratio = math.log(max(ratio, _MIN_SHARE))
    projected = np.zeros(state.size)
    prior = _project(covariance, slope, projected) + part * part * plan_variance
    changed = abs(log_ratio) > max(outlier_sd * math.sqrt(prior + relative_noise), min_outlier)
    if changed:
        sign = 1 if log_ratio > 0 else -1
        suspected = suspected + sign if suspected * sign > 0 else sign
        if abs(suspected) < patience:
            return 0.0, part, math.inf, suspected, False
        for link in range(links):
            covariance[link, link] += log_ratio * log_ratio
        prior = _project(covariance, slope, projected) + part * part * plan_variance
    innovation, expected = log_ratio, prior + relative_noise
    if not changed and noise > prior:
        # Seconds that are a small difference of large ones: the mean of their logarithm is biased, that of the ratio
        # is not, and to the first order the two agree.
        expected = prior + noise
        limit = _MAX_INNOVATION_SD * math.sqrt(expected)
        innovation = max(-limit, min(limit, ratio - 1))
    for row in range(state.size):
        state[row] += projected[row] * innovation / expected
        for column in range(state.size):
            covariance[row, column] -= projected[row] * projected[column] / expected
    return innovation, part, expected, 0, changed


class Plans(NamedTuple):
    """Plans of a bucket: their costs, and each one's rows of the tables of corrections."""

    coefficients: Array
    log_kernel_s: Array
    speed_of: Array
    kernel_of: Array
    round_of: Array


class Corrections(NamedTuple):
    """Tables with a row for each correction: error, variance, and step of its last update."""

    speeds: Array
    kernels: Array
    rounds: Array


@compiled
def predict(
    plans: Plans, corrections: Corrections, unit: Array, factor_variance: Array, step: int, ageing: float,
    max_sd: float, added_s: float, out: Array,
) -> None:  # fmt: skip
    """Predict plans: write kernel seconds, seconds in rounds and the standard deviation of the logarithm of their sum.

    ``ageing`` is the variance that a step adds to a correction that it does not update, ``added_s`` the seconds that
    contention adds to every plan. ``out`` has shape (3, plans).
    """
    coefficients, log_kernel_s, speed_of, kernel_of, round_of = plans
    speeds, kernels, rounds = corrections
    for plan in range(coefficients.shape[0]):
        predicted, uncertain = 0.0, 0.0
        for term in range(unit.size):
            predicted += coefficients[plan, term] * unit[term]
        for term in range(unit.size):
            if coefficients[plan, term] != 0:  # most are 0: a plan consists of a few operations
                share = coefficients[plan, term] * unit[term] / max(predicted, 1e-12)
                uncertain += share * share * factor_variance[term]
        speed, kernel, round_ = speeds[speed_of[plan]], kernels[kernel_of[plan]], rounds[round_of[plan]]
        kernels_s = math.exp(log_kernel_s[plan] + speed[0] + kernel[0])
        predicted *= math.exp(round_[0])
        total = kernels_s + predicted + added_s
        uncertain += round_[1] + ageing * (step - round_[2])
        uncertain *= (predicted / total) ** 2
        variance = uncertain + (kernels_s / total) ** 2 * (kernel[1] + ageing * (step - kernel[2]))
        out[0, plan] = kernels_s
        out[1, plan] = predicted + added_s
        out[2, plan] = min(math.sqrt(variance), max_sd)


@compiled
def choose(out: Array, too_slow: float, among: Array) -> tuple[int, int]:
    """Return the plan of least predicted seconds, and that of least seconds minus a standard deviation."""
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
