"""Device memory of sweeps and selections.

The last block of a sweep adds up the sums of all blocks, in an order that does not depend on timing.
"""

import functools
from enum import IntEnum
from typing import Any

import numpy as np
from mpicomp.kernels.gpu.compile import LIMIT, library, sweeps, tiles, word_of
from mpicomp.kernels.gpu.select import BINS, Field, counters_of_tiles

COLUMNS = 3  # sums of the sweep of error feedback, the first of them an integer
MARGIN = 0.8  # the first bound for candidates, as a fraction of the threshold of the step before


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
    """Return a `Partials` of up to two columns for launches of the current stream whose totals nobody reads later.

    To make one takes longer than such a launch.
    """
    cupy = library()
    return _of_stream(cupy, cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)


@functools.cache
def _of_stream(cupy: Any, device: int, stream: int) -> Partials:
    return Partials(LIMIT, 2)


class Fit(IntEnum):
    """Places of an estimate's numbers on the device, of 64 bits each."""

    THRESHOLD, BITS, DONE, REACHED, LEFT, CORRECTIONS, TRIED, BELOW, LOW, LOW_COUNT, ABOVE, HIGH, HIGH_COUNT = range(13)


class Workspace:
    """Scratch of `topk` and `sidco` for one bucket, of 8 to 12 bytes a candidate and 21 bytes a tile of 16 KiB.

    Results of these functions lie in it until their next call with it; it belongs to one stream at a time. ``room`` is
    the number of candidates that can be kept: four times the expected number of selected elements serves well.
    """

    def __init__(self, numel: int, room: int, dtype: Any) -> None:
        if not 0 <= numel < 2**32:
            raise ValueError(f"Workspace: numel must be below 2**32 for indices of 32 bits, got {numel}")
        cupy = library()
        self.numel = numel
        self.room = min(max(0, room), numel)
        self.dtype = np.dtype(dtype)
        self.blocks = sweeps(numel, self.dtype)
        self.tiles = tiles(numel, self.dtype)
        self.index = cupy.empty(self.room, np.uint32)
        self.bits = cupy.empty(self.room, word_of(self.dtype))
        self.counts = cupy.empty(self.tiles, np.uint32)
        self.starts = cupy.empty(self.tiles, np.uint64)
        self.of_tiles, self.before = counters_of_tiles(self.tiles)
        self.counters = cupy.zeros(BINS, np.uint64)
        self.state = cupy.zeros(len(Field), np.uint64)
        self.numbers = self.state.view(np.int64)
        self.moments = Partials(self.blocks, COLUMNS, top=True)
        self.sampled = Partials(self.blocks, 3)  # of sweeps over some groups, which have as many blocks at most
        self.fit = cupy.zeros(len(Fit), np.float64)
        # Parts of these, cut out once: to cut costs the host as much as a third of a launch.
        self.fresh = self.state[: Field.TICKET + 1]
        self.threshold = self.state[Field.THRESHOLD :]
        self.rank = self.numbers[Field.K :]
        self.estimated = self.fit.view(np.uint64)[Fit.BITS :]
        self.nonzero, self.total, self.energy = self.moments.count(), self.moments.total(1), self.moments.total(2)
        self.finite = self.moments.finite()
        self.listed, self.usable = self.numbers[Field.LISTED], self.numbers[Field.USABLE]

    def begin(self, gradient: Any, out: Any) -> None:
        """Refuse arrays that this workspace was not made for, and forget what a call left that an exception ended."""
        for array in (gradient, out):
            if array.size != self.numel or array.dtype != self.dtype:
                raise ValueError(
                    f"Workspace: made for {self.numel} elements of {self.dtype}, got {array.size} of {array.dtype}"
                )
        self.fresh.fill(0)  # candidates are counted, and blocks that have ended, from zero
