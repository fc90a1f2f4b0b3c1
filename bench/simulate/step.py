"""A step: backward as it was recorded, and exchanges of simulated seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpicomp.bench.simulate.measured import Measured


@dataclass(frozen=True)
class Seconds:
    """What one bucket's exchange takes: the slowest rank's own work, and rounds."""

    own: float
    rounds: float

    @property
    def whole(self) -> float:
        """Both, one after the other."""
        return self.own + self.rounds


def ends(measured: Measured, exchanges: Sequence[float], overlap: bool) -> tuple[list[float], list[float]]:
    """Return when buckets are ready and when each has been exchanged, from the beginning of the step.

    Buckets are exchanged one after the other, each as soon as backward has come to all that is in it, the last one
    when backward is over; without overlap all of them then.
    """
    over = measured.forward_s + measured.backward_s
    ready = [measured.forward_s + own.ready_s if overlap else over for own in measured.buckets]
    ready[-1] = over  # what only then is known goes with it
    now, finished = 0.0, []
    for start, seconds in zip(ready, exchanges, strict=True):
        now = max(now, start) + seconds
        finished.append(now)
    return ready, finished


def step_seconds(measured: Measured, exchanges: Sequence[float], overlap: bool) -> float:
    """Return the seconds of a step; see `ends`."""
    return ends(measured, exchanges, overlap)[1][-1] + measured.update_s
