"""A mean that is zero but for what was added to it, and remembers where that was."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.wire_format import SHARING, MessageHeader, unpack_sharing
from mpicomp.device import current_device
from mpicomp.workspace import Workspace

_MANY = 16  # if more than one element in so many was touched, setting the whole array to zero is faster


class SparseMean:
    """Sums sparse selections into an array that it clears only where the step before has written.

    Memory of a device is cleared whole, which takes one launch.

    Parameters
    ----------
    numel : int
        Length of the array.
    dtype : numpy.dtype
        float32 or float64.
    """

    def __init__(self, numel: int, dtype: np.dtype[Any]) -> None:
        device = current_device()
        self.array: NDArray[np.floating] = device.zeros(numel, dtype)
        self._workspace = Workspace(device)
        self._on_host = isinstance(self.array, np.ndarray)
        self._touched: list[NDArray[np.uint32]] = []

    @classmethod
    def cleared(cls, workspace: Workspace, numel: int, dtype: np.dtype[Any]) -> "SparseMean":
        """Return the workspace's mean of this length, all zero."""
        mean = workspace.made((cls, numel, dtype), lambda: cls(numel, dtype))
        mean._clear()
        return mean

    def add(self, indices: NDArray[np.uint32], values: NDArray[np.floating], factor: float) -> bool:
        """Add ``factor * values`` at ``indices``; False, and nothing is written, where one is out of range.

        On a device nobody waits for the answer, a 0-d array.
        """
        self._touch(indices)
        added: bool = kernels.scatter_add(indices, values, factor, self.array)
        if self._on_host and not added:
            self._touched.pop()
        return added

    def add_messages(self, messages: NDArray[np.uint8], told: Sequence[MessageHeader], factor: float) -> bool:
        """Add ``factor`` times the selections of several messages, in their order.

        Parameters
        ----------
        messages : array of uint8
            Holds all of them.
        told : sequence of MessageHeader
            Of each, with its places in ``messages``; none is damaged.
        factor : float
            Factor of all values.

        Returns
        -------
        bool
            Whether all indices ascend below the length of the mean and all scales of values are sound; else the mean
            may hold anything. On a device a 0-d array, or True where there are no messages.
        """
        right = True
        for (stored, coding), group in groupby(told, key=lambda own: (own.stored, own.coding)):
            own = list(group)
            counts = [each.count for each in own]
            indices, indices_at = messages, [each.indices_at for each in own]
            if coding != "plain":
                decoded = self._workspace.array("decoded", sum(counts), np.uint32)
                sound = kernels.decode_indices_of(messages, indices_at, counts, self.array.size, decoded)
                right = _both(right, sound)
                indices, indices_at = decoded, [4 * start for start in accumulate(counts[:-1], initial=0)]
            values, values_at = messages, [each.values_at for each in own]
            if stored in SHARING:
                unpacked = self._workspace.array("values", sum(counts), self.array.dtype)
                right = _both(right, unpack_sharing(messages, own, unpacked))
                values, stored = unpacked.view(np.uint8), self.array.dtype.name
                values_at = [self.array.dtype.itemsize * start for start in accumulate(counts[:-1], initial=0)]
            if self._on_host:
                if not right:
                    break
                for start, count in zip(indices_at, counts, strict=True):
                    part = indices.view(np.uint8)[start : start + 4 * count]
                    self._touch(part.view(np.uint32))
            right = kernels.sparse_add(
                values, values_at, indices, indices_at, counts, stored, factor, self.array, right
            )
        if self._on_host and not right:
            self._touched.clear()  # which may be out of range
            self.array.fill(0)
        return right

    def _touch(self, indices: NDArray[np.uint32]) -> None:
        if self._on_host:
            touched = self._workspace.array(f"touched.{len(self._touched)}", indices.size, np.uint32)
            touched[:] = indices
            self._touched.append(touched)

    def _clear(self) -> None:
        if not self._on_host or sum(touched.size for touched in self._touched) > self.array.size // _MANY:
            self.array.fill(0)
        else:
            for touched in self._touched:
                kernels.clear_at(touched, self.array)
        self._touched.clear()


def _both(first: bool, second: bool) -> bool:
    """Return whether two answers are yes, of which each may be known on a device only."""
    if first is True:
        return second
    return first if second is True else first & second
