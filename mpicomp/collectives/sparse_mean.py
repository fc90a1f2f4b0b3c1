"""A mean that is zero but for what was added to it, and remembers where that was."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels import cpu
from mpicomp.workspace import Workspace

_MANY = 16  # if more than one element in so many was touched, setting the whole array to zero is faster


class SparseMean:
    """Sums sparse selections into an array that it clears only where the step before has written.

    Parameters
    ----------
    numel : int
        Length of the array.
    dtype : numpy.dtype
        float32 or float64.
    """

    def __init__(self, numel: int, dtype: np.dtype[Any]) -> None:
        self.array: NDArray[np.floating] = np.zeros(numel, dtype)
        self._workspace = Workspace()
        self._touched: list[NDArray[np.uint32]] = []

    @classmethod
    def cleared(cls, workspace: Workspace, numel: int, dtype: np.dtype[Any]) -> "SparseMean":
        """Return the workspace's mean of this length, all zero."""
        mean = workspace.made((cls, numel, dtype), lambda: cls(numel, dtype))
        mean._clear()
        return mean

    def add(self, indices: NDArray[np.uint32], values: NDArray[np.floating], factor: float) -> bool:
        """Add ``factor * values`` at ``indices``; False, and nothing is written, where one is out of range."""
        touched = self._workspace.array(f"touched.{len(self._touched)}", indices.size, np.uint32)
        touched[:] = indices
        if not cpu.scatter_add(indices, values, factor, self.array):
            return False
        self._touched.append(touched)
        return True

    def _clear(self) -> None:
        if sum(touched.size for touched in self._touched) > self.array.size // _MANY:
            self.array[:] = 0
        else:
            for touched in self._touched:
                cpu.clear_at(touched, self.array)
        self._touched.clear()
