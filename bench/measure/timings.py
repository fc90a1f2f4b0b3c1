"""Seconds of each step on every rank: gathered, and their medians."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import Round


def means_between(ends: Sequence[int], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of steps' rows between ends; shape (ranks, ends, columns)."""
    sums = np.cumsum(rows, axis=1)[:, np.array(ends) - 1]
    means: NDArray[np.float64] = np.diff(sums, axis=1, prepend=0.0) / np.diff(ends, prepend=0)[None, :, None]
    return means


def gather(array: NDArray[np.float64], transport: Transport) -> NDArray[np.float64]:
    """Return the arrays of all ranks, stacked, once all ranks have come. Collective."""
    size = transport.group.size
    flat = np.ascontiguousarray(array).reshape(-1)
    task = Round("allgatherv", [flat.size] * size, flat.dtype, send=flat, recv=np.empty(size * flat.size))
    return transport.perform(task).reshape(size, *array.shape)


_SURE = 3.0  # standard errors by which a rank is slower than the middle one not by chance


@dataclass(frozen=True)
class Slowest:
    """The rank with most work of its own: seconds of a step less those of waiting in exchanges."""

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
