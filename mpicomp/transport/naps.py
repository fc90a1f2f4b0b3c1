"""Waiting with short sleeps, which leaves the core to other threads and processes."""

import os
import time
from collections.abc import Callable

SHORTEST_S = 50e-6  # seconds of the first nap
LONGEST_S = 200e-6  # seconds up to which naps double


class Naps:
    """Rests between questions whether something is done: first the core is offered to others, then naps grow.

    Parameters
    ----------
    eager : int
        Number of rests that only yield the core, after the start and after each `reset`.
    meanwhile : callable, optional
        Called before every nap.
    longest : float
        Seconds up to which naps double.
    """

    def __init__(
        self, eager: int = 200, meanwhile: Callable[[], None] | None = None, longest: float = LONGEST_S
    ) -> None:
        self._eager = eager
        self._meanwhile = meanwhile
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        """Be eager again: something was done."""
        self._left = self._eager
        self._nap = SHORTEST_S

    def rest(self) -> None:
        """Leave the core to others for a moment: yield it at first, sleep later."""
        if self._left:
            self._left -= 1
            os.sched_yield()
        else:
            if self._meanwhile is not None:
                self._meanwhile()
            time.sleep(self._nap)
            self._nap = min(2 * self._nap, self._longest)


def wait(done: Callable[[], bool], meanwhile: Callable[[], None] | None = None) -> None:
    """Ask until something is done, with rests in between; see `Naps`."""
    naps = Naps(meanwhile=meanwhile)
    while not done():
        naps.rest()
