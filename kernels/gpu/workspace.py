"""Device memory of sweeps and selections.

The last block of a sweep adds up the sums of all blocks, in an order that does not depend on timing.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from mpicomp.kernels.cpu import Moments
from mpicomp.kernels.gpu.compile import WARPS, library, sweeps, word_of
from mpicomp.kernels.gpu.select import BINS, Field, Listing, tiles_of

COLUMNS = 3  # sums of the sweep of error feedback, the first of them an integer


class Word(IntEnum):
    """Places of a sweep's results, of 64 bits each; the totals of columns follow."""

    TICKET, TOP, FINITE, TOTALS = range(4)


def _references(objects: Iterable[Any]) -> list[int]:
    return [sys.getrefcount(item) for item in objects]


_FREE_REFERENCES = _references({0: object()}.values())[0]
"""References to a result that nothing but its owner holds; Python's versions count them differently."""


class Reused:
    """Device memory that launches of a stream use in turn, cleared once: they leave it as they have found it.

    To make such arrays, and to cut numbers out of them, takes the host longer than a launch.
    """

    def __init__(self, size: int, dtype: Any = np.float64) -> None:
        self.memory = library().zeros(size, dtype)
        self.results: dict[tuple[int, Any], Any] = {}

    def number(self, place: int, dtype: Any) -> Any:
        """Return a number as a 0-d array, the same one at every call; it is valid while it is referenced."""
        if (place, dtype) not in self.results:
            self.results[place, dtype] = self.memory[place : place + 1].view(dtype)[0]
        return self.results[place, dtype]


ReusedType = TypeVar("ReusedType", bound=Reused)


class Pools(threading.local):
    """Memory of a thread's launches, by device, stream and shape."""

    def __init__(self) -> None:
        self.by_key: dict[Any, list[Any]] = {}


pools = Pools()


def reuse(make: Callable[..., ReusedType], *shape: Any) -> ReusedType:
    """Return ``make(*shape)`` for a launch of the current stream: one without results in use, if there is one."""
    cuda = library().cuda
    pool = pools.by_key.setdefault((cuda.runtime.getDevice(), cuda.get_current_stream().ptr, make, *shape), [])
    for found in pool:
        if all(count == _FREE_REFERENCES for count in _references(found.results.values())):
            return found  # type: ignore[no-any-return]
    pool.append(make(*shape))
    return pool[-1]  # type: ignore[no-any-return]


class Partials(Reused):
    """Memory of a sweep: sums of its blocks, columns of them, and the totals that the last block computes.

    With ``top`` blocks leave their largest magnitude bits, too. One launch may use it at a time; the next one, once
    that has ended, overwrites it.
    """

    def __init__(self, blocks: int, columns: int, top: bool = False) -> None:
        super().__init__(Word.TOTALS + columns + (columns + top) * blocks)

    def total(self, column: int) -> Any:
        """Return a sum as a 0-d array."""
        return self.number(Word.TOTALS + column, np.float64)

    def count(self) -> Any:
        """Return the sum of the first column, where the sweep makes an integer of it."""
        return self.number(Word.TOTALS, np.int64)

    def top(self) -> Any:
        """Return the largest magnitude bits, as uint64."""
        return self.number(Word.TOP, np.uint64)

    def finite(self) -> Any:
        """Return whether all elements are finite numbers, as a 0-d array."""
        return self.number(Word.FINITE, np.bool_)

    def found(self) -> Moments:
        """Return the numbers of a sweep of error feedback."""
        return Moments(self.count(), self.total(1), self.total(2), self.finite())


class Verdict(Reused):
    """Result of a launch that checks its input."""

    def __init__(self) -> None:
        super().__init__(3, np.uint64)

    def good(self) -> Any:
        """Return whether no fault was found, as a 0-d array."""
        return self.number(2, np.bool_)


class Table(Reused):
    """A few integers from the host."""

    def __init__(self, size: int) -> None:
        super().__init__(size, np.int64)
        self.sources: deque[Any] = deque(maxlen=8)  # of the last copies, which may read them later


def table_of_rows(rows: Any) -> Any:
    """Return rows of integers on the device, flat, until the next launch of this stream that takes as many."""
    flat = np.array(rows, np.int64).reshape(-1)
    table = reuse(Table, flat.size)
    table.sources.append(flat)
    table.memory.set(flat)
    return table.memory


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
        blocks = sweeps(numel, self.dtype)
        self.tiled = tiles_of(numel, self.dtype)
        state, number = self.tiled.state, self.tiled.number
        self.listing = Listing(
            cupy.empty(self.room, np.uint32), cupy.empty(self.room, word_of(self.dtype)),
            cupy.empty(number, np.uint64), cupy.empty(number, np.uint32), self.room,
        )  # fmt: skip
        self.counters = cupy.zeros(BINS, np.uint64)
        self.numbers = state.view(np.int64)
        self.moments = Partials(blocks, COLUMNS, top=True)
        self.sampled = Partials(blocks, 3)  # of sweeps over some groups, which have as many blocks at most
        self.sums = self.moments.memory, Partials(-(-number // WARPS), 1).memory  # the latter of the selected elements
        self.fit = cupy.zeros(len(Fit), np.float64)
        # Parts of these, cut out once: to cut costs the host as much as a third of a launch.
        self.fresh = state[: Field.TICKET + 1]
        self.threshold = state[Field.THRESHOLD :]
        self.rank = self.numbers[Field.K :]
        self.estimated = self.fit.view(np.uint64)[Fit.BITS :]
        self.found = self.moments.found()
        self.listed, self.usable = self.numbers[Field.LISTED], self.numbers[Field.USABLE]

    def begin(self, gradient: Any, out: Any) -> None:
        """Refuse arrays that this workspace was not made for, and clear the rest of a call that an exception ended."""
        for array in (gradient, out):
            if array.size != self.numel or array.dtype != self.dtype:
                raise ValueError(
                    f"Workspace: made for {self.numel} elements of {self.dtype}, got {array.size} of {array.dtype}"
                )
        self.fresh.fill(0)  # candidates are counted, and blocks that have ended, from zero
