"""Device memory that a selection needs at every step, allocated once."""

from enum import IntEnum
from typing import Any

import numpy as np
from mpicomp.kernels.gpu.compile import library, sweeps, tiles, word_of
from mpicomp.kernels.gpu.reduce import Partials
from mpicomp.kernels.gpu.select import BINS, Field, counters_of_tiles
from mpicomp.kernels.gpu.sweeps import COLUMNS

MARGIN = 0.8  # the first bound for candidates, as a fraction of the threshold of the step before


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
