"""The elements of at least a magnitude, listed while the sum is computed, and queries that need no further sweep."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.wire import Selection
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu
from mpicomp.workspace import Workspace

_WORDS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.uint64),
}


class Candidates:
    """The elements of a part of the sum from a bound on, and answers that hold for all elements of the part.

    `Accumulated.list_above` makes them. Questions above the bound, a magnitude from an earlier step, are answered from
    the list of at most ``room`` elements, others by a sweep over the array: the answers are the same. A bound of 0
    lists nothing. ``name`` is that of the arrays in the workspace.
    """

    def __init__(
        self, total: NDArray[np.floating], part: slice, bound: float, room: int, workspace: Workspace, name: str,
        kernels: Any, threads: int,
    ) -> None:  # fmt: skip
        self.part = part
        self.array = total[part]
        """The part of the sum."""
        self._total, self._workspace, self._name = total, workspace, name
        self._kernels, self._threads = kernels, threads
        self._word = word = _WORDS[total.dtype]
        size = min(room, self.array.size) if bound > 0 else 0
        self.bound: int = cpu.magnitude_bits(bound, total.dtype) if size else 0
        """Magnitude bits (`mpicomp.kernels.cpu.magnitude_bits`) from which on elements are listed; 0 lists none."""
        self.index = workspace.scratch(name + ".index", size, np.uint32)
        """Positions of listed elements in the whole sum, ascending."""
        self.bits = workspace.scratch(name + ".bits", size, word)
        """Magnitude bits of listed elements."""
        self.found = 0
        """Number of elements from the bound on."""
        self.listed = 0
        """Number of elements in the list; 0 if not all that were found did fit."""
        self._scratch: NDArray[Any] | None = None  # listed magnitudes, the k largest last, once k were selected

    def set_found(self, found: int) -> None:
        """Set the number of elements that a sweep found."""
        self.found, self.listed = found, found if found <= self.index.size else 0

    def count(self, threshold: float) -> int:
        """Count the elements above a threshold."""
        if self._covers(threshold):
            tail = self._kernels.tail_statistics(self._listed_values, threshold)
        else:
            tail = self._kernels.tail_statistics(self.array, threshold, 1, self._threads)
        [count] = to_python(tail.count)
        return int(count)

    def tail(self, threshold: float, stride: int = 1) -> cpu.TailStatistics:
        """Count the elements above a threshold, and sum their excess, in the array: a list would round differently."""
        return cpu.TailStatistics(
            *to_python(*self._kernels.tail_statistics(self.array, threshold, stride, self._threads))
        )

    def logarithms(self, stride: int) -> tuple[int, float, float]:
        """Sum magnitudes and their logarithms; see `mpicomp.kernels.cpu.logarithms`."""
        count, total, logarithm = to_python(*self._kernels.logarithms(self.array, stride, self._threads))
        return count, total, logarithm

    def top(self) -> float:
        """Return the largest magnitude."""
        listed = self.bits[: self.listed]
        [bits] = to_python(listed.max() if self.listed else self._kernels.kth_magnitude(self.array, 1))
        return cpu.magnitude_of(int(bits), self.array.dtype)

    def above(self, threshold: float, expected: int, known: bool = False) -> Selection:
        """Select the elements above a threshold; ``expected`` is their number, exact if it is ``known``."""
        listed = self.listed if self._covers(threshold) else 0
        selection = self._selection(listed or max(1, expected))
        if listed:
            indices, values = selection.indices, selection.values
            found = self._kernels.select_listed(
                self.index[:listed], self.bits[:listed], threshold, self._total, indices, values
            )
        else:
            found = self._select_above(threshold, selection.indices, selection.values)
        [count] = [expected] if known else to_python(found)
        if count > selection.indices.size:
            selection = self._selection(count)
            self._select_above(threshold, selection.indices, selection.values)
        return Selection(selection.indices[:count], selection.values[:count])

    def largest(self, k: int) -> tuple[Selection, int]:
        """Select the k largest, exactly; return them, ascending by index, and the smallest of their magnitude bits.

        Of equal magnitudes the lower index goes first, and NaN is larger than infinity. On a device the bits are a 0-d
        array.
        """
        selection, array = self._selection(k), self.array
        if k // 4 < self.listed < k:
            self._list_more(k)
        listed = self.listed
        if k <= listed:
            self._scratch = scratch = self._workspace.scratch(self._name + ".scratch", listed, self._word)
            bits = self._kernels.select_candidates(
                self.index[:listed], self.bits[:listed], scratch, self._total, selection.indices, selection.values
            )
        else:
            bits = self._kernels.kth_magnitude(array, k)
            self._kernels.select_largest(array, bits, selection.indices, selection.values)
            if self.part.start:
                np.add(selection.indices, np.uint32(self.part.start), out=selection.indices)
        return selection, bits

    def reserve(self, k: int) -> int:
        """Return the magnitude bits of the candidate of rank 3 k / 2, or of the last; 0 if `largest` had no list."""
        scratch, rank = self._scratch, k + k // 2
        if scratch is None:
            return 0
        listed = scratch.size
        if isinstance(scratch, np.ndarray):  # which `largest` has left in two parts: a radix selection takes longer
            if listed <= rank:
                return int(scratch[: listed - k].min(initial=scratch[listed - k]))
            if k < rank:
                scratch[: listed - k].partition(listed - rank)
            return int(scratch[listed - rank])
        bits: int = self._kernels.kth_magnitude(self._listed_values, min(listed, rank))
        return bits

    def bound_for_next(self, k: int, threshold: float, before: float, reserve: int) -> float:
        """Return the bound of the next step's candidates, which is meant to list half as many again as k.

        Under error feedback elements crowd below the threshold, so that no fixed fraction of it would do, and for the
        first few hundred steps it rises. ``before`` is the threshold of the step before or 0.
        """
        found, listed = self.found, self.listed
        if listed == 0 and found > k:  # too many to be stored: assume that they are spread evenly
            bound = cpu.magnitude_of(self.bound, self.array.dtype)
            return threshold - (threshold - bound) * 0.5 * k / (found - k)
        if listed < k:
            return 0.97 * threshold
        lower = cpu.magnitude_of(reserve, self.array.dtype)
        if listed < k + k // 2:
            lower *= 0.98
        return lower * (min(max(threshold / before, 0.8), 1.2) if before > 0 else 1.0)

    def _list_more(self, wanted: int) -> None:
        """List again with a lower bound, which takes a fraction of the time of a radix selection."""
        dtype = self.array.dtype
        for factor in (0.95, 0.7):
            bound = factor * cpu.magnitude_of(self.bound, dtype)
            [found] = to_python(self._select_above(bound, self.index, self.bits.view(dtype)))
            self.set_found(found)
            self.bound = cpu.magnitude_bits(bound, dtype) + 1
            listed = self.bits[:found]
            np.bitwise_and(listed, cpu.mask_of(dtype), out=listed)
            if found >= wanted:
                return

    @property
    def _listed_values(self) -> NDArray[np.floating]:
        return self.bits[: self.listed].view(self.array.dtype)

    def _covers(self, threshold: float) -> bool:
        return self.listed > 0 and cpu.magnitude_bits(threshold, self.array.dtype) >= self.bound

    def _select_above(self, threshold: float, indices: NDArray[np.uint32], values: NDArray[np.floating]) -> Any:
        return self._kernels.select_above(self.array, threshold, self.part.start, indices, values, 0)

    def _selection(self, size: int) -> Selection:
        indices = self._workspace.array(self._name + ".indices", size, np.uint32)
        return Selection(indices, self._workspace.array(self._name + ".values", size, self.array.dtype))
