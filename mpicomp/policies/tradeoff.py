"""Time against delay: the plans with which a model gets furthest in the time that they take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.policies.allocate import least_makespan

_BEHIND = 120.0  # steps that training falls behind for each step of delay beyond the first, where all is signal
_BINS = 400  # bins from 0 to the longest delay, in which delays are counted
_LATER = 3.0  # times the longest delay of all, which that of one bucket may be
_SLACK = 1.1  # by which the longest delay may be missed before plans that run are given up


def behind(delay: float | NDArray[np.float64], signal: float) -> float | NDArray[np.float64]:
    """Return the steps by which training falls behind when gradients are late by some steps.

    Measured with top-k at ratios from 0.001 to 0.1, on ``text-lstm`` with Adam and on ``digits`` with momentum: little
    below a delay of one step, and in proportion to it beyond. What is late is harmful as far as it is signal: noise of
    a batch is as good later. See docs/policies.md.

    Parameters
    ----------
    delay : float or array
        Steps.
    signal : float
        Share of signal in the energy of gradients, in (0, 1].
    """
    return _BEHIND * signal * delay * delay / (1 + delay)


def delay_for(steps: float, signal: float) -> float:
    """Return the delay for which training falls behind by some steps.

    Examples
    --------
    >>> round(behind(delay_for(2.0, 0.1), 0.1), 9)
    2.0
    """
    share = steps / (_BEHIND * signal)
    return (share + math.sqrt(share * share + 4 * share)) / 2


@dataclass(frozen=True)
class Balance:
    """Rows of every bucket, with their seconds and delays, and the state of training.

    After ``age`` steps a model is where it would have been ``behind(delay, signal)`` steps before, so that ``(age +
    behind) x seconds of a step`` is what it takes to where it is.

    Parameters
    ----------
    delays : sequence of arrays, shape (rows,)
        Steps by which each row of each bucket delays gradients; of each bucket some row does not.
    seconds : sequence of arrays, shape (rows,)
        Of each row.
    weights : sequence of float
        Shares of the buckets in the energy of a gradient.
    ready : sequence of float
        When each bucket is, against the last one.
    beside : float
        Seconds of a step beside what the exchange adds to it.
    age : float
        Steps of training.
    longest : float
        The longest delay that may be, of at least 0.
    signal : float
        Share of signal in the energy of gradients.
    """

    delays: Sequence[NDArray[np.float64]]
    seconds: Sequence[NDArray[np.float64]]
    weights: Sequence[float]
    ready: Sequence[float]
    beside: float
    age: float
    longest: float
    signal: float

    def delay(self, choice: Sequence[int]) -> float:
        """Return the delay under a row for every bucket, in steps."""
        parts = zip(self.delays, choice, self.weights, strict=True)
        return float(sum(own[row] * weight for own, row, weight in parts))

    def worth(self, choice: Sequence[int]) -> float:
        """Return the seconds to where the model is; the less the better."""
        end = -math.inf
        for own, row, moment in zip(self.seconds, choice, self.ready, strict=True):
            end = max(end, moment) + own[row]
        return float((self.age + behind(self.delay(choice), self.signal)) * (self.beside + end))

    def allows(self, choice: Sequence[int]) -> bool:
        """Return whether a choice keeps to the longest delays, with some slack."""
        latest = max(own[row] for own, row in zip(self.delays, choice, strict=True))
        return self.delay(choice) <= _SLACK * self.longest and latest <= _SLACK * _LATER * self.longest

    def best(self) -> list[int]:
        """Return the row of every bucket for which `worth` is least, of those with delays that may be."""
        most = _LATER * self.longest
        rows = [_undominated(*own, most) for own in zip(self.delays, self.seconds, strict=True)]
        late = [own[kept] * weight for own, kept, weight in zip(self.delays, rows, self.weights, strict=True)]
        time = [own[kept] for own, kept in zip(self.seconds, rows, strict=True)]
        ends, solutions = least_makespan(late, time, self.ready, self.longest, _BINS)
        delays = np.minimum(np.arange(ends.size) / _BINS, 1.0) * self.longest
        worth = (self.age + behind(delays, self.signal)) * (self.beside + ends)
        choice = solutions.at(int(worth.argmin()))
        return [int(kept[own]) for kept, own in zip(rows, choice, strict=True)]


def _undominated(delays: NDArray[np.float64], seconds: NDArray[np.float64], most: float) -> NDArray[np.int64]:
    """Return the rows for which no other one is as fast and delays as little; at least one that delays least."""
    order = np.lexsort((delays, seconds))
    order = order[delays[order] <= max(most, float(delays.min()))]
    lowest = np.minimum.accumulate(delays[order])
    return order[np.concatenate(([True], delays[order][1:] < lowest[:-1]))]
