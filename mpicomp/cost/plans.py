"""What the candidate plans of one bucket are predicted to take, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost.network import Network

_OWN_SD = 0.25  # of the logarithm of what a plan takes in rounds over what the network says, before it was run
_KERNEL_SD = 0.5  # of its own work over what it took alone
_AGEING = 0.3**2 / 500  # variance that a step without it adds: a third after 500 steps
_MOST_SD = 0.7  # where ageing ends
_NOISE = 0.1**2  # of the logarithm of what is measured
_LEAST_SHARE = 0.02  # of a plan's seconds that is in rounds
_ACCIDENT = 0.5  # of the logarithm: own work that differs by more is taken for this much, but the first time
_CHANGED_SD = 0.15  # what a change of the network adds


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
    """What was learnt of one plan at one length; logarithms, with their variances.

    Attributes
    ----------
    kernels, kernels_variance : float
        Of the seconds of its own work over what it took alone.
    rounds, rounds_variance : float
        Of the seconds in rounds over what the network says.
    runs : int
        How often it was run.
    """

    kernels: float = 0.0
    kernels_variance: float = _KERNEL_SD**2
    rounds: float = 0.0
    rounds_variance: float = _OWN_SD**2
    runs: int = 0


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
    learnt : sequence of Learnt
        What is known of each; written to.
    """

    def __init__(
        self, network: Network, coefficients: NDArray[np.float64], alone: Sequence[float], learnt: Sequence[Learnt]
    ) -> None:
        self._network = network
        self._coefficients = coefficients
        self._alone = np.log(np.maximum(alone, 1e-7))
        self._learnt = learnt
        self._step = 0
        self._last = np.full(len(learnt), -1)
        self._awaited = np.zeros(len(learnt), bool)
        self._table = np.array([[own.kernels, own.kernels_variance, own.rounds, own.rounds_variance] for own in learnt])
        self._expected = self._predict()

    def __len__(self) -> int:
        return len(self._learnt)

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
        """Give the standard deviation of the logarithm of each plan's seconds, apart from what the links share.

        It is zero where a plan is being explored and what it took is not known yet.
        """
        kernels_s, rounds_s = self._expected
        kernels_variance, rounds_variance = self._table[:, 1], self._table[:, 3]
        age = np.where(self._last < 0, 0, self._step - self._last)
        share = rounds_s / (kernels_s + rounds_s)
        own = rounds_variance + self._network.factor_variance(self._coefficients)
        variance = share**2 * own + (1 - share) ** 2 * kernels_variance + _AGEING * age
        return np.where(self._awaited, 0.0, np.minimum(np.sqrt(variance), _MOST_SD))

    def age(self, plan: int) -> int | None:
        """Give the number of steps since a plan was run; None where it never was."""
        return None if self._last[plan] < 0 else int(self._step - self._last[plan])

    def explore(self, plan: int) -> None:
        """Note that a plan is run to be known better: before what it took is told, running it again is of no use."""
        self._awaited[plan] = True

    def observe(self, plan: int, kernels_s: float, seconds: float) -> bool:
        """Learn from what a plan took, the same numbers on all ranks; tell whether the network has changed.

        The first time teaches nothing: buffers are made then.

        Parameters
        ----------
        plan : int
            Which.
        kernels_s : float
            Seconds of the slowest rank's own work.
        seconds : float
            From the last rank's start to the last rank's end.
        """
        own = self._learnt[plan]
        self._awaited[plan] = False
        idle = self._step - self._last[plan]
        self._last[plan], first = self._step, self._last[plan] < 0
        if first:
            return False
        kernels_variance = own.kernels_variance + _AGEING * idle
        surprise = math.log(max(kernels_s, 1e-7)) - float(self._alone[plan]) - own.kernels
        if own.runs:
            surprise = max(-_ACCIDENT, min(_ACCIDENT, surprise))
        gain = kernels_variance / (kernels_variance + _NOISE)
        own.kernels += gain * surprise
        own.kernels_variance = (1 - gain) * kernels_variance + _AGEING

        rounds_variance = own.rounds_variance + _AGEING * idle
        # What is left beside the own work is as uncertain as the whole, however little it is.
        rounds_s = max(seconds - kernels_s, _LEAST_SHARE * seconds)
        innovation, variance, changed = self._network.observe(
            self._coefficients[plan], rounds_s, _NOISE * (seconds / rounds_s) ** 2, own.rounds, rounds_variance
        )
        gain = rounds_variance / variance
        own.rounds += gain * innovation
        own.rounds_variance = (1 - gain) * rounds_variance + _AGEING
        own.runs += 1
        self._table[plan] = own.kernels, own.kernels_variance, own.rounds, own.rounds_variance
        return changed

    def unsettle(self) -> None:
        """Predict with links that were measured anew, and trust what was learnt of plans less."""
        self._table[:, 3] += _CHANGED_SD**2
        for own in self._learnt:
            own.rounds_variance += _CHANGED_SD**2
        self._expected = self._predict()

    def step(self) -> None:
        """Let a step pass, after all buckets' measurements were learnt from."""
        self._step += 1
        self._expected = self._predict()

    def _predict(self) -> tuple[NDArray[Any], NDArray[Any]]:
        kernels, _, rounds, _ = self._table.T
        return np.exp(self._alone + kernels), self._network.seconds(self._coefficients) * np.exp(rounds)
