"""Time against progress: the plans with which a model gets furthest in the time that they take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.policies.allocate import least_makespan

_BINS = 400  # bins from 0 to what may be lost, in which it is counted
_NOTHING = 1e-3  # share of a step that is left at least, so that seconds are finite
_MORE = 2.0  # times what training may lose, which one bucket may: layers need each other
_SLACK = 1.1  # by which what may be lost is missed before plans that run are given up


@dataclass(frozen=True)
class Balance:
    """Rows of every bucket, with their seconds and what they lose, and the state of training.

    Training that falls behind by a share of its steps takes ``seconds of a step / (1 - share)`` for what is a step of
    dense training.

    Parameters
    ----------
    behind : sequence of arrays, shape (rows,)
        Share of steps by which each row of each bucket falls behind; of each bucket some row does not.
    seconds : sequence of arrays, shape (rows,)
        Of each row.
    weights : sequence of float
        Shares of the buckets in what a step achieves.
    ready : sequence of float
        When each bucket is, against the last one.
    beside : float
        Seconds of a step beside what the exchange adds to it.
    most : float
        The largest share of steps that may be lost, at least 0.
    steps : int
        That ranks make by themselves from one exchange to the next.
    apart : float
        Share of steps that is lost since ranks go apart in these, whatever is exchanged.
    """

    behind: Sequence[NDArray[np.float64]]
    seconds: Sequence[NDArray[np.float64]]
    weights: Sequence[float]
    ready: Sequence[float]
    beside: float
    most: float
    steps: int = 1
    apart: float = 0.0

    def lost(self, choice: Sequence[int]) -> float:
        """Return the share of steps that is lost under a row for every bucket."""
        parts = zip(self.behind, choice, self.weights, strict=True)
        return self.apart + float(sum(own[row] * weight for own, row, weight in parts))

    def worth(self, choice: Sequence[int]) -> float:
        """Return the seconds of what is a step of dense training; the less the better."""
        end = -math.inf
        for own, row, moment in zip(self.seconds, choice, self.ready, strict=True):
            end = max(end, moment) + own[row]
        return float((self.steps * self.beside + end) / self.steps / max(1 - self.lost(choice), _NOTHING))

    def allows(self, choice: Sequence[int]) -> bool:
        """Return whether a choice loses no more than may be lost, with some slack."""
        worst = max(own[row] for own, row in zip(self.behind, choice, strict=True))
        return self.lost(choice) <= _SLACK * self.most and worst <= _SLACK * _MORE * self.most

    def best(self) -> list[int]:
        """Return the row of every bucket for which `worth` is least, of those that lose no more than may be."""
        rows = [_undominated(*own, _MORE * self.most) for own in zip(self.behind, self.seconds, strict=True)]
        lost = [own[kept] * weight for own, kept, weight in zip(self.behind, rows, self.weights, strict=True)]
        time = [own[kept] for own, kept in zip(self.seconds, rows, strict=True)]
        most = max(0.0, self.most - self.apart)
        ends, solutions = least_makespan(lost, time, self.ready, most, _BINS)
        shares = self.apart + np.minimum(np.arange(ends.size) / _BINS, 1.0) * most
        worth = (self.steps * self.beside + ends) / np.maximum(1 - shares, _NOTHING)
        choice = solutions.at(int(worth.argmin()))
        return [int(kept[own]) for kept, own in zip(rows, choice, strict=True)]


def _undominated(behind: NDArray[np.float64], seconds: NDArray[np.float64], most: float) -> NDArray[np.int64]:
    """Return the rows for which no other one is as fast and loses as little; at least one that loses least."""
    order = np.lexsort((behind, seconds))
    order = order[behind[order] <= max(most, float(behind.min()))]
    lowest = np.minimum.accumulate(behind[order])
    return order[np.concatenate(([True], behind[order][1:] < lowest[:-1]))]
