"""What the candidate plans of one bucket are predicted to take, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost.network import Network

_SPEED_SD = 0.5  # of the logarithm of how much longer a compressor takes than alone, before it was run
_SPEED_DRIFT, _SPEED_MOST = 0.02**2, 0.1**2  # variance that a step adds to it, and up to which
_KERNELS_SD = 0.25  # of a scheme's own work over what it took alone, that apart
_ROUNDS_SD = 0.2  # of what a plan takes in rounds over what the network says
_AGEING = 0.3**2 / 500  # variance that a step without it adds: a third after 500 steps
_MOST_SD = 0.7  # where ageing ends
_NOISE = 0.1**2  # of the logarithm of what is measured
_LEAST_SHARE = 0.02  # of a plan's seconds that is in rounds
_ACCIDENT = 0.5  # of the logarithm: own work that differs by more is taken for this much, but the first time
_CHANGED_SD = 0.1  # what a change of the network adds


@dataclass(frozen=True)
class Prediction:
    """Seconds that a plan is expected to take.

    Attributes
    ----------
    kernels_s : float
        Of the slowest rank's own work.
    rounds_s : float
        Of the rest: in rounds, from when the last rank is there.
    """

    kernels_s: float
    rounds_s: float

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.kernels_s + self.rounds_s

    def phases(self) -> dict[str, float]:
        """Give both by name, as records have them."""
        return {"kernels": self.kernels_s, "exchange": self.rounds_s}


@dataclass
class Learnt:
    """What steps told of something at one length.

    Attributes
    ----------
    error : float
        Logarithm of what it takes over what is predicted without this.
    variance : float
        Of the error.
    runs : int
        How many steps told it.
    """

    error: float
    variance: float
    runs: int = 0

    @classmethod
    def speed(cls, others: Sequence["Learnt"]) -> "Learnt":
        """Give what is known of how much longer a compressor takes than alone, from other lengths."""
        return cls(_mean(others), _SPEED_SD**2)

    @classmethod
    def kernels(cls, others: Sequence["Learnt"]) -> "Learnt":
        """Give what is known of a scheme's own work that was never run at this length, from other lengths."""
        return cls(_mean(others), _KERNELS_SD**2)

    @classmethod
    def rounds(cls, others: Sequence["Learnt"]) -> "Learnt":
        """Give what is known of a plan's rounds that was never run at this length, from other lengths."""
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
        Of each plan's rounds. Written to.
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
        self._speeds = speeds
        self._kernels = kernels
        self._rounds = rounds
        self._step = 0
        self._last = np.full(len(rounds), -1)
        self._step_of_kernels = np.full(len(rounds), -1)
        self._refresh()

    def __len__(self) -> int:
        return len(self._rounds)

    def prediction(self, plan: int) -> Prediction:
        """Give what a plan is expected to take at the next step."""
        kernels_s, rounds_s = self._expected
        return Prediction(float(kernels_s[plan]), float(rounds_s[plan]))

    def seconds(self) -> NDArray[np.float64]:
        """Give what each plan is expected to take at the next step."""
        kernels_s, rounds_s = self._expected
        whole: NDArray[np.float64] = kernels_s + rounds_s
        return whole

    def spread(self) -> NDArray[np.float64]:
        """Give the standard deviation of the logarithm of each plan's seconds, apart from what the links share."""
        kernels_s, rounds_s = self._expected
        share = rounds_s / (kernels_s + rounds_s)
        rounds = self._rounds_variance + self._network.factor_variance(self._coefficients)
        rounds += _AGEING * _age(self._step, self._last)
        kernels = self._kernels_variance + _AGEING * _age(self._step, self._step_of_kernels)
        spread: NDArray[np.float64] = np.sqrt(share**2 * rounds + (1 - share) ** 2 * kernels)
        return np.minimum(spread, _MOST_SD)

    def age(self, plan: int) -> int | None:
        """Give the number of steps since a plan's seconds were learnt from; None where they never were."""
        return None if self._last[plan] < 0 else int(self._step - self._last[plan])

    def observe(self, plan: int, kernels_s: float, seconds: float) -> bool:
        """Learn from what a plan took, the same numbers on all ranks; tell whether the network has changed.

        Parameters
        ----------
        plan : int
            Which.
        kernels_s : float
            Seconds of the slowest rank's own work.
        seconds : float
            From the last rank's start to the last rank's end.
        """
        speed, kernels, rounds = self._speeds[plan], self._kernels[plan], self._rounds[plan]
        surprise = math.log(max(kernels_s, 1e-7)) - float(self._alone[plan]) - speed.error - kernels.error
        if speed.runs:
            surprise = max(-_ACCIDENT, min(_ACCIDENT, surprise))
        before = kernels.variance + _AGEING * int(_age(self._step, self._step_of_kernels[plan]))
        variance = speed.variance + before + _NOISE
        _update(speed, speed.variance, surprise, variance, max(0.0, min(_SPEED_DRIFT, _SPEED_MOST - speed.variance)))
        _update(kernels, before, surprise, variance, _AGEING)

        # What is left beside the own work is as uncertain as the whole, however little it is.
        rounds_s = max(seconds - kernels_s, _LEAST_SHARE * seconds)
        before = rounds.variance + _AGEING * int(_age(self._step, self._last[plan]))
        innovation, variance, changed = self._network.observe(
            self._coefficients[plan], rounds_s, _NOISE * (seconds / rounds_s) ** 2, rounds.error, before
        )
        _update(rounds, before, innovation, variance, _AGEING)
        self._last[plan] = self._step
        for other, theirs in enumerate(self._kernels):
            if theirs is kernels:
                self._step_of_kernels[other] = self._step
        return changed

    def unsettle(self) -> None:
        """Predict with links that were measured anew, and trust what was learnt of plans less."""
        for rounds in self._rounds:
            rounds.variance += _CHANGED_SD**2
        self._refresh()

    def step(self) -> None:
        """Let a step pass, after all buckets' measurements were learnt from."""
        self._step += 1
        self._refresh()

    def _refresh(self) -> None:
        """Put what was learnt into arrays, and predict with it."""
        known = [
            (s.error + k.error, k.variance, r.error, r.variance)
            for s, k, r in zip(self._speeds, self._kernels, self._rounds, strict=True)
        ]
        kernels, self._kernels_variance, rounds, self._rounds_variance = np.array(known).T
        self._expected: tuple[NDArray[Any], NDArray[Any]] = (
            np.exp(self._alone + kernels),
            self._network.seconds(self._coefficients) * np.exp(rounds),
        )


def _update(own: Learnt, before: float, innovation: float, variance: float, drift: float) -> None:
    """Take an innovation of some variance into account, of which ``before`` is the own part; it drifts afterwards."""
    gain = before / variance
    own.error += gain * innovation
    own.variance = (1 - gain) * before + drift
    own.runs += 1


def _age(step: int, last: Any) -> Any:
    """Give the steps since something was learnt; where nothing was, since the start."""
    return step - np.maximum(last, 0)


def _mean(others: Sequence[Learnt]) -> float:
    known = [own.error for own in others if own.runs]
    return sum(known) / len(known) if known else 0.0
