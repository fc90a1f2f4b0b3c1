"""Delay of a bucket's gradients, in steps, under a ratio; learnt from the gains of its exchanges."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SLOPE = 1.4  # delay ~ ratio ** -slope; 0.9 to 1.9 were measured, the steeper the shorter the delay
_FIRST = 0.05  # ratio of the first guess
_GROWS = 4.0  # factor by which its delay grows from that without a residual
_LEARN = 0.15  # weight of a step in the running average of the delay
_LONGEST_WAIT = 30  # steps, at most, until a residual is taken to be steady
_AFTER_DENSE = 2  # times as many steps until a residual is steady that begins empty, after dense exchange


@dataclass
class Delays:
    """Estimate of the delay of one bucket's gradients, in steps, as a power of the ratio.

    In a steady state the residual's energy E does not grow: what a step sends, S, is what it adds, and gradients are
    late by ``E / S`` steps. Exchanges tell both, by their gain ``S / (E + S)``. Of other ratios it is taken to be a
    power of the ratio; what was measured last and nearest counts.

    Attributes
    ----------
    ratio : float or None
        The ratio for which `delay` is known; None before anything is known.
    delay : float
        Steps, in a steady state, where all is delivered that is selected.
    inflow : float
        Energy that a step adds, summed over ranks.
    wait : int
        Steps until the residual is taken to be steady under what runs.
    """

    ratio: float | None = None
    delay: float = 0.0
    inflow: float = 0.0
    wait: int = 0
    _running: tuple[float, float] | None = None  # ratio and factor; None where all was sent

    @property
    def steady(self) -> bool:
        """Whether the running plan has run for long enough to be judged."""
        return self.wait <= 0

    def guess(self, lost: float) -> None:
        """Begin with the share of energy that a selection at a ratio of `first_ratio` leaves out of a gradient."""
        if self.ratio is None:
            self.ratio, self.delay = _FIRST, max(_GROWS * lost / max(1 - lost, 1e-3), 1e-3)

    def at(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the delay at some ratios, infinite where nothing is known."""
        if self.ratio is None:
            return np.full(np.shape(ratios), np.inf)
        delays: NDArray[np.float64] = self.delay * (self.ratio / ratios) ** _SLOPE
        return delays

    def observe(self, ratio: float | None, factor: float, energy: float, gain: float, steps: int = 1) -> float | None:
        """Learn from an exchange.

        Parameters
        ----------
        ratio : float or None
            That ran; None where all was sent.
        factor : float
            By how much longer delays are known to be with the collective that ran.
        energy, gain : float
            See `mpicomp.collectives.Result`.
        steps : int
            Of which this is the last one, and stands for all.

        Returns
        -------
        float or None
            By how much longer the delay was than is known of the ratio; None while the residual is not steady.
        """
        sent = energy * gain
        self.inflow = sent if self.inflow == 0 else self.inflow + over(_LEARN, steps) * (sent - self.inflow)
        running = None if ratio is None else (ratio, factor)
        if running is None or self.ratio is None:
            self._running = None
            return None
        if self._running is None or self._running[0] != ratio:
            expected = factor * float(self.at(np.array(ratio)))
            patience = _AFTER_DENSE if self._running is None else 1
            self.wait = min(_LONGEST_WAIT, math.ceil(1 + patience * expected))
        self._running = running
        self.wait -= steps
        if self.wait > 0:
            return None
        seen = max((1 - gain) / gain, 1e-4)
        known = float(self.at(np.array(ratio)))
        self.ratio, self.delay = ratio, known * (seen / (factor * known)) ** over(_LEARN, steps)
        return seen / known

    def state(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, JSON-able."""
        return {"ratio": self.ratio, "delay": self.delay}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Delays":
        """Restore the state that `state` returned."""
        ratio = state["ratio"]
        return cls(None if ratio is None else float(ratio), float(state["delay"]))


@dataclass
class Lateness:
    """Estimate of the delay of one bucket's gradients under a compressor without a ratio, such as a quantiser.

    Attributes
    ----------
    delay : float
        Steps; infinite before anything is known.
    ran : bool
        Whether the delay was learnt from exchanges, and not guessed.
    """

    delay: float = math.inf
    ran: bool = False

    def guess(self, lost: float) -> None:
        """Take up the share of energy that is left out of a gradient, until exchanges have told more."""
        if not self.ran and math.isfinite(lost):
            self.delay = max(lost / max(1 - lost, 1e-3), 1e-4)

    def observe(self, gain: float, steps: int) -> None:
        """Learn from an exchange; see `Delays.observe`."""
        seen = max((1 - gain) / gain, 1e-4)
        known = self.delay if math.isfinite(self.delay) else seen
        self.delay, self.ran = known * (seen / known) ** over(_LEARN, steps), True

    def state(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, JSON-able."""
        return {"delay": self.delay if self.ran else None}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Lateness":
        """Restore the state that `state` returned."""
        return cls() if state["delay"] is None else cls(float(state["delay"]), True)


def over(share: float, steps: int) -> float:
    """Return the share of the last one of some steps in an average that each of them has a share in."""
    return 1 - (1 - share) ** steps


def first_ratio() -> float:
    """Return the ratio that `Delays.guess` begins with."""
    return _FIRST
