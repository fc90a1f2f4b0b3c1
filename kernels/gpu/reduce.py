"""Sums over an array, which the last block of a sweep adds up in an order that no timing changes."""

import functools
from enum import IntEnum
from typing import Any

import numpy as np
from mpicomp.kernels.gpu.compile import LIMIT, library


class Word(IntEnum):
    """Places of what a sweep has found, of 64 bits each; the totals of columns follow."""

    TICKET, TOP, FINITE, TOTALS = range(4)


class Partials:
    """Memory of a sweep: sums of its blocks, columns of them, and the totals that the last block computes.

    With ``top`` blocks leave their largest magnitude bits, too. One launch may use it at a time; the next one, once
    that has ended, overwrites it.
    """

    def __init__(self, blocks: int, columns: int, top: bool = False) -> None:
        # The ticket has to be zero, as a launch leaves it; to clear all costs the host less than to cut that out.
        self.memory = library().zeros(Word.TOTALS + columns + (columns + top) * blocks, np.float64)

    def total(self, column: int) -> Any:
        """Return a sum as a 0-d array."""
        return self.memory[Word.TOTALS + column]

    def count(self) -> Any:
        """Return the sum of the first column, where the sweep makes an integer of it."""
        return self.memory.view(np.int64)[Word.TOTALS]

    def top(self) -> Any:
        """Return the largest magnitude bits, as uint64."""
        return self.memory.view(np.uint64)[Word.TOP]

    def finite(self) -> Any:
        """Return whether all elements are finite numbers, as a 0-d array."""
        return self.memory[Word.FINITE : Word.FINITE + 1].view(np.bool_)[0]


def kept_partials() -> Partials:
    """Return a `Partials` of one column for launches of the current stream whose totals nobody reads later.

    To make one takes longer than such a launch.
    """
    cupy = library()
    return _of_stream(cupy, cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)


@functools.cache
def _of_stream(cupy: Any, device: int, stream: int) -> Partials:
    return Partials(LIMIT, 1)
