"""Sums over an array in two steps, the second one in an order that no timing changes."""

from typing import Any

import numpy as np
from mpicomp.kernels.gpu.compile import launch, library


class Partials:
    """Partial sums of the blocks of a sweep, and the totals that `finish` makes of them.

    Parameters
    ----------
    blocks : int
        Number of blocks of the sweep.
    columns : int
        Number of sums that every block leaves.
    top : bool
        Whether blocks leave their largest magnitude bits, too.
    """

    def __init__(self, blocks: int, columns: int, top: bool = False) -> None:
        self.blocks = blocks
        self.columns = columns
        self._top = top
        numbers = library().empty((columns + top) * blocks + columns + 2, np.float64)
        self.sums = numbers[: columns * blocks]
        self.tops = numbers[columns * blocks : (columns + 1) * blocks].view(np.uint64) if top else 0
        self.results = numbers[numbers.size - columns - 2 : numbers.size - 2]
        self._largest = numbers[numbers.size - 2 : numbers.size - 1].view(np.uint64)
        self._finite = numbers[numbers.size - 1 :].view(np.bool_)

    def finish(self, dtype: Any, integers: int = 0) -> None:
        """Add up the partial sums; bit c of ``integers`` makes an integer of column c."""
        launch(
            "reduce", "finish", dtype, self.columns + self._top,
            self.sums, self.columns, integers, self.tops, self.blocks, self.results, self._largest, self._finite,
        )  # fmt: skip

    def total(self, column: int) -> Any:
        """Return a sum as a 0-d array."""
        return self.results[column]

    def count(self, column: int) -> Any:
        """Return a sum that was made an integer."""
        return self.results.view(np.int64)[column]

    def top(self) -> Any:
        """Return the largest magnitude bits, as uint64."""
        return self._largest[0]

    def finite(self) -> Any:
        """Return whether all elements are finite numbers, as a 0-d array."""
        return self._finite[0]
