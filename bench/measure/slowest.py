"""The rank that the others wait for, found from the seconds of all ranks' steps."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

_SURE = 3.0  # standard errors by which a rank has to be slower than the middle one, and not by chance


@dataclass(frozen=True)
class Slowest:
    """The rank with most work of its own: what a step takes less what it waits in exchanges."""

    rank: int
    # Mean seconds a step by which it works longer than the middle rank (of an even number, the faster of the two in the
    # middle), for which the others wait
    costs_s: float
    error_s: float  # standard error of this

    @classmethod
    def of(cls, own_s: NDArray[np.float64]) -> Self | None:
        """Find it; None where there is one rank, or fewer than two steps."""
        ranks, steps = own_s.shape
        if ranks < 2 or steps < 2:
            return None
        longer = own_s - np.sort(own_s, axis=0)[(ranks - 1) // 2]
        rank = int(longer.mean(axis=1).argmax())
        return cls(rank, float(longer[rank].mean()), float(longer[rank].std(ddof=1)) / math.sqrt(steps))

    def matters(self, step_s: float, share: float) -> bool:
        """Return whether it costs more than a share of a step, and not by chance."""
        return self.costs_s > share * step_s and self.costs_s > _SURE * self.error_s
