"""Which rank is slowest: ranks tell each other now and then how long they work between exchanges."""

from typing import Any

import numpy as np

from mpicomp.rounds import Pending, Round, Rounds

EVERY = 16
"""Steps from one time that ranks tell each other to the next: a message to each in so many costs next to nothing."""

_SECONDS = np.dtype(np.float64)


class Pace:
    """Finds the rank that the others wait for, and what that costs, in messages that nobody waits for.

    What counts is a rank's own work: the seconds from the end of one exchange to that of the next, less those in which
    it waits. No clock has to be the same on two ranks for that.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.slowest_rank: int | None = None
        """The rank with most work of its own; None before ranks have told each other."""
        self.slowest_costs_s: float | None = None
        """Seconds a step by which it works longer than the middle one (of an even number, the faster of two)."""
        self._ranks = ranks
        self._ended: float | None = None
        self._own_s: list[float] = []
        self._under_way: Pending | None = None

    def note(self, ended: float, waited_s: float, counts: bool) -> None:
        """Count the work of a step.

        Parameters
        ----------
        ended : float
            When its exchange has ended, in seconds of any clock.
        waited_s : float
            Seconds of it in which this rank waited for others.
        counts : bool
            Whether it was one like the others.
        """
        if self._ended is not None and counts:
            self._own_s.append(ended - self._ended - waited_s)
        self._ended = ended

    def tell(self, step: int) -> Rounds[None]:
        """Hear what was told at the step before, and tell the others after every so many steps. As rounds."""
        if self._under_way is not None:
            own_s = yield self._under_way
            self._under_way = None
            self.slowest_rank, self.slowest_costs_s = slowest_of(own_s)
        if self._ranks > 1 and step % EVERY == EVERY - 1:
            send = np.array([sum(self._own_s) / max(len(self._own_s), 1)], _SECONDS)
            self._own_s.clear()
            recv = np.empty(self._ranks, _SECONDS)
            self._under_way = yield Round(
                "allgatherv", [1] * self._ranks, _SECONDS, send=send, recv=recv, background=True
            )


def slowest_of(own_s: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, float]:
    """Return the rank that works longest, and by how many seconds longer than the middle one.

    Examples
    --------
    >>> slowest_of(np.array([1.0, 1.25, 3.25, 1.5]))
    (2, 2.0)
    """
    slowest = int(own_s.argmax())
    return slowest, float(own_s[slowest] - np.sort(own_s)[(own_s.size - 1) // 2])
