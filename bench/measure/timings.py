"""Seconds of each step on every rank: gathered, and their medians."""

from collections.abc import Sequence

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


def slowest_rank(own_s: NDArray[np.float64]) -> tuple[int, float] | tuple[None, None]:
    """Return the rank with most work of its own, and the mean seconds a step by which it is behind the middle rank.

    Of an even number the middle rank is the faster of the two in the middle; None of one rank, or of one step.

    >>> slowest_rank(np.array([[1.0, 1.0], [3.0, 5.0], [2.0, 2.0]]))
    (1, 2.0)
    """
    ranks, steps = own_s.shape
    if ranks < 2 or steps < 2:
        return None, None
    longer = (own_s - np.sort(own_s, axis=0)[(ranks - 1) // 2]).mean(axis=1)
    return int(longer.argmax()), float(longer.max())
