"""Predicted seconds of the candidate plans of one bucket, with their uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost import arithmetic
from mpicomp.cost.contention import Contention
from mpicomp.cost.network import Network

_SPEED_SD = 0.5  # standard deviation of the logarithm of a compressor's seconds over those alone, before it was run
_SPEED_DRIFT = 0.02**2  # variance that a step adds to the logarithm of a speed
_SPEED_MOST = 0.1**2  # largest variance of a speed by drift
_KERNELS_SD = 0.25  # standard deviation of the logarithm of a scheme's own work over its prediction, speed apart
_ROUNDS_SD = 0.2  # standard deviation of the logarithm of a plan's seconds in rounds over the network's prediction
_AGEING = 0.3**2 / 5000  # variance that a step without the plan adds: a deviation of 0.3 after 5000 steps
_MOST_SD = 0.7  # largest standard deviation by ageing
_NOISE = 0.1**2  # variance of the logarithm of a measurement
_LEAST_SHARE = 0.02  # smallest share of a plan's seconds that counts as time in rounds
_ACCIDENT = 0.5  # of the logarithm: own work that differs by more counts as this much, except the first time
_LEAST_S = 1e-6  # what takes less is not told from what takes nothing
_CHANGED_SD = 0.1  # standard deviation that a change of the network adds


@dataclass(frozen=True)
class Prediction:
    """Seconds that a plan is expected to take.

    Attributes
    ----------
    kernels_s : float
        Of the slowest rank's own work.
    rounds_s : float
        Of the rest: in rounds, from when the last rank is there, contention included.
    """

    kernels_s: float
    rounds_s: float

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.kernels_s + self.rounds_s

    def phases(self) -> dict[str, float]:
        """Return both by name, as records have them."""
        return {"kernels": self.kernels_s, "exchange": self.rounds_s}


@dataclass(slots=True)  # there may be hundreds for each of hundreds of plans
class Learnt:
    """A correction learnt from measured steps for arrays of like lengths: its logarithm and variance.

    Attributes
    ----------
    error : float
        Logarithm of the measured seconds over those predicted without this correction.
    variance : float
        Of the error.
    runs : int
        Number of steps that it was learnt from.
    """

    error: float
    variance: float
    runs: int = 0

    @classmethod
    def speed(cls, others: Sequence["Learnt"]) -> "Learnt":
        """Return a first correction for a compressor's own work over its time alone, from other lengths."""
        return cls(_mean(others), _SPEED_SD**2)

    @classmethod
    def kernels(cls, others: Sequence["Learnt"]) -> "Learnt":
        """Return a first correction for a scheme's own work at a length where it never ran, from other lengths."""
        return cls(_mean(others), _KERNELS_SD**2)

    @classmethod
    def rounds(cls, others: Sequence["Learnt"]) -> "Learnt":
        """Return a first correction for a plan's rounds at a length where it never ran, from other lengths."""
        return cls(_mean(others), _ROUNDS_SD**2)


class Candidates:
    """The plans among which one bucket's is chosen.

    Parameters
    ----------
    network : Network
        Shared by all buckets.
    coefficients : array, shape (plans, terms)
        See `Network.coefficients`.
    alone : sequence of float
        Seconds that each plan's own work takes alone.
    speeds : sequence of Learnt
        How much longer own work takes than alone: plans with the same compressor share one, since other ranks and what
        a residual looks like slow all of them down. Written to.
    kernels : sequence of Learnt
        Of each plan's own work, that apart; plans that do the same work share one. Written to.
    rounds : sequence of Learnt
        Of each plan's rounds; one collective with one compressor at several ratios shares one. Written to.
    """

    def __init__(
        self,
        network: Network,
        coefficients: NDArray[np.float64],
        alone: Sequence[float],
        speeds: Sequence[Learnt],
        kernels: Sequence[Learnt],
        rounds: Sequence[Learnt],
    ) -> None:
        self._network = network
        self._coefficients = coefficients
        self._alone = np.log(np.maximum(alone, 1e-7))
        self._speeds, self._speed_of = _distinct(speeds)
        self._kernels, self._kernel_of = _distinct(kernels)
        self._rounds, self._round_of = _distinct(rounds)
        self._step = 0
        self._contention = Contention()
        # Of each that was learnt: error, variance, and the step at which it was; see `arithmetic.outlook`.
        self._tables = [
            np.array([_row(own, 0) for own in part]) for part in (self._speeds, self._kernels, self._rounds)
        ]
        self._outlook = np.empty((3, len(rounds)))
        self._last = np.full(len(rounds), -1)  # step of each plan that was last learnt from
        self._refresh()

    def __len__(self) -> int:
        return self._last.size

    def prediction(self, plan: int) -> Prediction:
        """Return the predicted seconds of a plan at the next step."""
        return Prediction(float(self._outlook[0, plan]), float(self._outlook[1, plan]))

    def seconds(self) -> NDArray[np.float64]:
        """Return the predicted seconds of each plan at the next step."""
        whole: NDArray[np.float64] = self._outlook[0] + self._outlook[1]
        return whole

    def choose(self, too_slow: float, among: NDArray[np.int64]) -> tuple[int, int]:
        """Return the plan that is predicted to be the fastest, and the one that may be for all that is known.

        Parameters
        ----------
        too_slow : float
            What is predicted to take this many times the least is not the second one.
        among : array of int64
            The plans that are looked at, at least one.
        """
        return arithmetic.choose(self._outlook, too_slow, among)

    def compare(self, plan: int, seconds: float) -> None:
        """Compare a plan's measured seconds with its prediction, and have the network suspected where they are far."""
        seconds, expected_s = max(seconds, _LEAST_S), max(self.prediction(plan).seconds, _LEAST_S)
        noise = math.hypot(_NOISE**0.5, self._contention.seconds / seconds)
        self._network.compare(math.log(seconds / expected_s), noise)

    def age(self, plan: int) -> int | None:
        """Return the number of steps since a plan's seconds were learnt from; None where they never were."""
        return self._step - int(self._last[plan]) if self._last[plan] >= 0 else None

    def observe(self, plan: int, kernels_s: float, seconds: float) -> bool:
        """Learn from a plan's measured seconds, the same on all ranks; return whether the network has changed.

        Parameters
        ----------
        plan : int
            Number of the plan.
        kernels_s : float
            Seconds of the slowest rank's own work.
        seconds : float
            From the last rank's start to the last rank's end.
        """
        speed_place, kernels_place = int(self._speed_of[plan]), int(self._kernel_of[plan])
        rounds_place = int(self._round_of[plan])
        speed, kernels, rounds = self._speeds[speed_place], self._kernels[kernels_place], self._rounds[rounds_place]
        _, kernels_table, rounds_table = self._tables
        expected = self.prediction(plan)
        surprise = math.log(max(kernels_s, 1e-7)) - float(self._alone[plan]) - speed.error - kernels.error
        if speed.runs:
            surprise = max(-_ACCIDENT, min(_ACCIDENT, surprise))
        before = kernels.variance + _AGEING * (self._step - kernels_table[kernels_place, 2])
        variance = speed.variance + before + _NOISE
        _update(speed, speed.variance, surprise, variance, max(0.0, min(_SPEED_DRIFT, _SPEED_MOST - speed.variance)))
        _update(kernels, before, surprise, variance, _AGEING)

        # What is left beside the own work is as uncertain as the whole, however little it is.
        rounds_s, added_s = seconds - kernels_s, self._contention.seconds
        most_s = max(rounds_s, expected.rounds_s, _LEAST_SHARE * seconds)
        noise = (_NOISE * expected.seconds**2 + added_s**2) / expected.rounds_s**2
        rough = (_NOISE * seconds**2 + added_s**2) / most_s**2
        before = rounds.variance + _AGEING * (self._step - rounds_table[rounds_place, 2])
        innovation, slope, variance, changed = self._network.observe(
            self._coefficients[plan], rounds_s, noise, rough, rounds.error, before, added_s
        )
        _update(rounds, before, innovation, variance, _AGEING, slope)
        self._contention.observe(plan, seconds)
        places = (speed_place, kernels_place, rounds_place)
        for table, place, own in zip(self._tables, places, (speed, kernels, rounds), strict=True):
            table[place] = _row(own, self._step)
        self._last[plan] = self._step
        return changed

    def unsettle(self, already: set[int] | None = None) -> None:
        """Predict with links that were measured anew, and trust corrections learnt for plans less.

        Parameters
        ----------
        already : set of int, optional
            Identities of corrections that other buckets' candidates have, and trust less by now; added to.
        """
        already = set() if already is None else already
        for own in self._rounds:
            if id(own) not in already:
                already.add(id(own))
                own.variance += _CHANGED_SD**2
        self.reread()

    def reread(self) -> None:
        """Take over corrections that other buckets' candidates have changed."""
        for table, part in zip(self._tables, (self._speeds, self._kernels, self._rounds), strict=True):
            table[:, :2] = [(own.error, own.variance) for own in part]
        self._refresh()

    def step(self) -> None:
        """Advance by a step, after all buckets' measurements were learnt from."""
        self._step += 1
        self._refresh()

    def _refresh(self) -> None:
        """Predict anew with the current state."""
        speeds, kernels, rounds = self._tables
        arithmetic.outlook(
            self._coefficients, self._network.units, self._network.factor_variance, self._alone, speeds, kernels,
            rounds, self._speed_of, self._kernel_of, self._round_of, self._step, _AGEING, _MOST_SD,
            self._contention.seconds, self._outlook,
        )  # fmt: skip


def _update(own: Learnt, before: float, innovation: float, variance: float, drift: float, slope: float = 1.0) -> None:
    """Take an innovation of some variance into account; ``before`` is the own variance, and it drifts afterwards.

    ``slope`` is how far what was measured follows the own error.
    """
    gain = slope * before / variance
    own.error += gain * innovation
    own.variance = (1 - gain * slope) * before + drift
    own.runs += 1


def _row(own: Learnt, step: int) -> tuple[float, float, float]:
    return own.error, own.variance, step


def _distinct(learnt: Sequence[Learnt]) -> tuple[list[Learnt], NDArray[np.int64]]:
    """Return objects without repetition, and the place of each plan's among them."""
    places: dict[int, int] = {}
    objects: list[Learnt] = []
    for own in learnt:
        if id(own) not in places:
            places[id(own)] = len(objects)
            objects.append(own)
    return objects, np.array([places[id(own)] for own in learnt])


def _mean(others: Sequence[Learnt]) -> float:
    known = [own.error for own in others if own.runs]
    return sum(known) / len(known) if known else 0.0
