"""Predicted seconds of the candidate plans of one bucket, with their uncertainty."""

import itertools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost import arithmetic
from mpicomp.cost.network_model import Network

SPEED_SD = 0.5  # standard deviation of the logarithm of a compressor's kernel seconds over those measured by itself
_SPEED_DRIFT_VARIANCE = 0.02**2  # that a step adds to the logarithm of a speed
_SPEED_MAX_VARIANCE = 0.1**2  # of a speed, by drift
KERNELS_SD = 0.25  # standard deviation of the logarithm of a scheme's kernel seconds, corrected by its speed
ROUNDS_SD = 0.2  # standard deviation of the logarithm of a plan's seconds in rounds over the network's prediction
HOST_ROUNDS_SD = 0.6  # the same inside one host, where caches decide, which no link's bandwidth shows
# The same logarithm before a library's sum of a large array between hosts has run: next to computation it took 1.2 to
# 1.6 times as long as alone, since its messages advance only while the rank tests for it.
LIBRARY_SUM_ERROR = 0.25
_AGEING_VARIANCE = 0.3**2 / 5000  # that a step without the plan adds: a deviation of 0.3 after 5000 steps
_MAX_SD = 0.7  # largest standard deviation by ageing
_NOISE_VARIANCE = 0.1**2  # of the logarithm of a measurement
_MIN_ROUNDS_FRACTION = 0.02  # smallest share of a plan's seconds that counts as time in rounds
_MAX_SURPRISE_LOG = 0.5  # kernel seconds that differ by more count as this much, except the first time
_MIN_S = 1e-6  # shorter times are not resolved
_MIN_KERNELS_S = 1e-7
_CHANGED_SD = 0.1  # standard deviation that a change of the network adds
_OUTLIER_PLAN_SD = 0.6  # of a plan with outliers on unchanged links: a tenth or ten times is no outlier then

_RECENT_PAIRS = 32  # pairs of measurements that count
_MIN_PAIRS = 3  # from which on contention is estimated
_MIN_PAIRS_OF_PLAN = 8  # from which on a plan is compared with others
_MAX_SPREAD_RATIO = 2.0  # times the median difference of the steadiest plan: beyond it a plan's noise is its property
_NORMAL_VARIATION = 0.3  # fraction of a plan's seconds by which two measurements differ without contention
_MEAN_OVER_MEDIAN = 1.44  # of an exponential distribution: 1 / ln 2


class Contention:
    """Estimates the seconds that contention adds to each of a bucket's exchanges, whatever the plan.

    That only adds seconds, different ones at each step, so two successive steps of one plan show how many: the mean
    difference of two exponential variables is their mean. Far larger differences of one plan are left out.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._differences: deque[tuple[int, float]] = deque(maxlen=_RECENT_PAIRS)
        self.seconds = 0.0
        """Mean added seconds."""

    def observe(self, plan: int, seconds: float) -> None:
        """Learn from the measured seconds of a plan, in the order of steps."""
        last, self._last = self._last, (plan, seconds)
        if last is None or last[0] != plan:
            return
        normal = _NORMAL_VARIATION * min(last[1], seconds)
        self._differences.append((plan, max(0.0, (last[1] - seconds) ** 2 - normal**2) ** 0.5))
        by_plan: defaultdict[int, list[float]] = defaultdict(list)
        for of_plan, difference in self._differences:
            by_plan[of_plan].append(difference)
        medians = [(statistics.median(some), some) for some in by_plan.values() if len(some) >= _MIN_PAIRS_OF_PLAN]
        least, _ = min(medians, default=(math.inf, []))
        steady = [some for median, some in medians if median <= _MAX_SPREAD_RATIO * least] or list(by_plan.values())
        pairs = list(itertools.chain.from_iterable(steady))
        self.seconds = _MEAN_OVER_MEDIAN * statistics.median(pairs) if len(pairs) >= _MIN_PAIRS else 0.0


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a plan: kernels of the slowest rank, and rounds from the last rank's start on."""

    kernels_s: float
    rounds_s: float  # contention included

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.kernels_s + self.rounds_s

    def phases(self) -> dict[str, float]:
        """Return both by their names in records."""
        return {"kernels": self.kernels_s, "exchange": self.rounds_s}


@dataclass(slots=True)  # there may be hundreds for each of hundreds of plans
class Correction:
    """A correction learned from measured steps for arrays of similar lengths."""

    error: float  # logarithm of the measured seconds over those predicted without this correction
    variance: float  # of the error
    runs: int = 0  # steps that it was learned from

    def update(self, variance: float, innovation: float, expected: float, drift: float, slope: float = 1.0) -> None:
        """Update with an innovation of ``expected`` variance, whose derivative by the error is ``slope``."""
        gain = slope * variance / expected
        self.error += gain * innovation
        self.variance = (1 - gain * slope) * variance + drift
        self.runs += 1


class Candidates:
    """The plans among which one bucket's is chosen, with their coefficients and kernel seconds without other ranks.

    Corrections are shared and updated in place: ``speeds`` of kernel seconds by plans of one compressor (other ranks,
    and the shape of a residual, slow all of them down), ``kernels`` by plans with the same kernels, ``rounds`` by the
    ratios of one compressor and collective.
    """

    def __init__(
        self,
        network: Network,
        coefficients: NDArray[np.float64],
        kernel_seconds: Sequence[float],
        speeds: Sequence[Correction],
        kernels: Sequence[Correction],
        rounds: Sequence[Correction],
    ) -> None:
        self._network = network
        self._corrections, rows = zip(*map(_distinct, (speeds, kernels, rounds)), strict=True)
        log_kernel_s = np.log(np.maximum(kernel_seconds, _MIN_KERNELS_S))
        self._plans = arithmetic.Plans(coefficients, log_kernel_s, *rows)
        self._step = 0
        self._contention = Contention()
        self._tables = arithmetic.Corrections(
            *(np.array([_row(correction, 0) for correction in part]) for part in self._corrections)
        )
        self._predicted = np.empty((3, len(rounds)))
        self._last_step = np.full(len(rounds), -1)  # step at which each plan was last measured
        self._refresh()

    @property
    def steps(self) -> int:
        """Number of steps that were learned from."""
        return self._step

    def prediction(self, plan: int) -> Prediction:
        """Return the predicted seconds of a plan at the next step."""
        return Prediction(float(self._predicted[0, plan]), float(self._predicted[1, plan]))

    def seconds(self) -> NDArray[np.float64]:
        """Return the predicted seconds of each plan at the next step."""
        total: NDArray[np.float64] = self._predicted[0] + self._predicted[1]
        return total

    def choose(self, too_slow: float, among: NDArray[np.int64]) -> tuple[int, int]:
        """Return the plan of least predicted seconds, and the one that may be the fastest within its uncertainty."""
        return arithmetic.choose(self._predicted, too_slow, among)

    def check_outlier(self, plan: int, seconds: float) -> None:
        """Compare a plan's measured seconds with its prediction; an outlier lets the network suspect a change."""
        seconds, expected_s = max(seconds, _MIN_S), max(self.prediction(plan).seconds, _MIN_S)
        sd = math.hypot(_NOISE_VARIANCE**0.5, self._contention.seconds / seconds)
        self._network.check_outlier(math.log(seconds / expected_s), sd)

    def age(self, plan: int) -> int | None:
        """Return the number of steps since a plan was last measured; None if it never was."""
        return self._step - int(self._last_step[plan]) if self._last_step[plan] >= 0 else None

    def observe(self, plan: int, kernels_s: float, seconds: float) -> bool:
        """Learn from a plan's seconds, the same on all ranks; return whether the network has changed."""
        coefficients, log_kernel_s, *rows_of = self._plans
        rows = [int(of_plan[plan]) for of_plan in rows_of]
        speed, kernels, rounds = (part[row] for part, row in zip(self._corrections, rows, strict=True))
        expected = self.prediction(plan)
        log_kernels_s = math.log(max(kernels_s, _MIN_KERNELS_S))
        surprise = log_kernels_s - float(log_kernel_s[plan]) - speed.error - kernels.error
        if speed.runs:
            surprise = max(-_MAX_SURPRISE_LOG, min(_MAX_SURPRISE_LOG, surprise))
        prior = kernels.variance + _AGEING_VARIANCE * (self._step - self._tables.kernels[rows[1], 2])
        variance = speed.variance + prior + _NOISE_VARIANCE
        speed_drift = max(0.0, min(_SPEED_DRIFT_VARIANCE, _SPEED_MAX_VARIANCE - speed.variance))
        speed.update(speed.variance, surprise, variance, speed_drift)
        kernels.update(prior, surprise, variance, _AGEING_VARIANCE)

        # The rest besides kernels is as uncertain as the total, however short it is.
        rounds_s, added_s = seconds - kernels_s, self._contention.seconds
        longest_s = max(rounds_s, expected.rounds_s, _MIN_ROUNDS_FRACTION * seconds)
        noise = (_NOISE_VARIANCE * expected.seconds**2 + added_s**2) / expected.rounds_s**2
        relative_noise = (_NOISE_VARIANCE * seconds**2 + added_s**2) / longest_s**2
        prior = rounds.variance + _AGEING_VARIANCE * (self._step - self._tables.rounds[rows[2], 2])
        innovation, slope, variance, changed = self._network.observe(
            coefficients[plan], rounds_s, noise, relative_noise, rounds.error, prior, added_s
        )
        rounds.update(prior, innovation, variance, _AGEING_VARIANCE, slope)
        self._contention.observe(plan, seconds)
        for table, row, correction in zip(self._tables, rows, (speed, kernels, rounds), strict=True):
            table[row] = _row(correction, self._step)
        self._last_step[plan] = self._step
        return changed

    def widen(self, plan: int) -> None:
        """Raise a plan's variance after outliers on unchanged links, so that the next measurements are learned."""
        correction = self._corrections[2][int(self._plans.round_of[plan])]
        correction.variance = max(correction.variance, _OUTLIER_PLAN_SD**2)

    def inflate_variance(self, inflated: set[int] | None = None) -> None:
        """Inflate corrections of rounds, once for all buckets (by ``inflated``), after links were measured again."""
        inflated = set() if inflated is None else inflated
        for correction in self._corrections[2]:
            if id(correction) not in inflated:
                inflated.add(id(correction))
                correction.variance += _CHANGED_SD**2
        self.refresh_corrections()

    def refresh_corrections(self) -> None:
        """Read corrections that other buckets' candidates share and have updated."""
        for table, part in zip(self._tables, self._corrections, strict=True):
            table[:, :2] = [(correction.error, correction.variance) for correction in part]
        self._refresh()

    def time_update(self) -> None:
        """Advance by a step, after the measurements of all buckets."""
        self._step += 1
        self._refresh()

    def _refresh(self) -> None:
        arithmetic.predict(
            self._plans, self._tables, self._network.unit_seconds, self._network.factor_variance, self._step,
            _AGEING_VARIANCE, _MAX_SD, self._contention.seconds, self._predicted,
        )  # fmt: skip


def _row(correction: Correction, step: int) -> tuple[float, float, float]:
    return correction.error, correction.variance, step


def _distinct(corrections: Sequence[Correction]) -> tuple[list[Correction], NDArray[np.int64]]:
    rows: dict[int, int] = {}
    objects: list[Correction] = []
    for correction in corrections:
        if id(correction) not in rows:
            rows[id(correction)] = len(objects)
            objects.append(correction)
    return objects, np.array([rows[id(correction)] for correction in corrections])
