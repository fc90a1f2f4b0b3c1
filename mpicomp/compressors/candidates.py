"""Large elements, listed in the sweep that makes the sum, and queries that need no further sweep."""

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.accumulated import Accumulated, Region
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import Selection
from mpicomp.kernels import cpu


class Candidates:
    """The elements of a part of a bucket from a bound on, and answers that hold for all of its elements.

    The bound comes from an earlier step. Whatever is asked for above it is answered from the list, which is
    short; for the rest, and where the list has no room, the array itself is swept. The answers are the same.

    Parameters
    ----------
    accumulated : Accumulated
        What the sum is made of.
    scope : Context
        Where arrays come from.
    bound : float
        Magnitude from which on elements are listed; 0 lists nothing.
    room : int
        Elements that can be listed.
    part : slice, optional
        Of the bucket; all of it when not given.
    place : int
        Number of this part, which tells its arrays from those of others.
    """

    def __init__(
        self,
        accumulated: Accumulated,
        scope: Context,
        bound: float,
        room: int,
        part: slice | None = None,
        place: int = 0,
    ) -> None:
        self._accumulated = accumulated
        self._workspace = scope.workspace
        self._name = f"candidates.{place}"
        self.part = slice(0, accumulated.numel) if part is None else part
        dtype = accumulated.dtype
        self._word = np.dtype(np.uint32 if dtype == np.float32 else np.uint64)
        room = min(room, self.numel) if bound > 0 else 0
        self.region = Region(
            self.part.start,
            self.part.stop,
            cpu.magnitude_bits(bound, dtype),
            scope.workspace.array(f"{self._name}.index", room, np.uint32),
            scope.workspace.array(f"{self._name}.bits", room, self._word),
        )

    @property
    def numel(self) -> int:
        """Elements of this part."""
        return self.part.stop - self.part.start

    @property
    def moments(self) -> cpu.Moments:
        """Of the whole sum, whatever part of it this is."""
        return self._accumulated.moments

    @property
    def array(self) -> NDArray[np.floating]:
        """The part of the sum."""
        return self._accumulated.array()[self.part]

    @property
    def listed(self) -> int:
        """Elements in the list; 0 where it is of no use."""
        region = self.region
        return region.found if region.found <= region.index.size else 0

    def count(self, threshold: float) -> int:
        """Count the elements above a threshold."""
        if self._covers(threshold):
            return cpu.tail(self.region.bits[: self.listed].view(self._accumulated.dtype), threshold).count
        return self.tail(threshold).count

    def tail(self, threshold: float, stride: int = 1) -> cpu.Tail:
        """Count the elements above a threshold, and sum their excess, in the array: a list would round differently."""
        return cpu.tail(self.array, threshold, stride, self._accumulated.threads)

    def logarithms(self, stride: int) -> tuple[int, float, float]:
        """Sum magnitudes and their logarithms; see `mpicomp.kernels.cpu.logarithms`."""
        return cpu.logarithms(self.array, stride, self._accumulated.threads)

    def top(self) -> float:
        """Return the largest magnitude."""
        bits = int(self.region.bits[: self.listed].max()) if self.listed else cpu.kth_magnitude(self.array, 1)
        return cpu.magnitude_of(bits, self._accumulated.dtype)

    def above(self, threshold: float, room: int) -> Selection:
        """Select the elements above a threshold, ascending by index.

        Parameters
        ----------
        threshold : float
            Magnitudes equal to it are not selected.
        room : int
            How many are expected; where there are more it takes another sweep.
        """
        listed = self.listed if self._covers(threshold) else 0
        selection = self._selection(listed or max(1, room))
        if listed:
            index, bits = self.region.index[:listed], self.region.bits[:listed]
            count = cpu.select_listed(index, bits, threshold, self._accumulated.array(), *_arrays(selection))
        else:
            array, start = self.array, self.part.start
            count = cpu.select_above(array, threshold, start, *_arrays(selection), 0)
            if count > selection.indices.size:
                selection = self._selection(count)
                cpu.select_above(array, threshold, start, *_arrays(selection), 0)
        return Selection(selection.indices[:count], selection.values[:count])

    def largest(self, k: int) -> tuple[Selection, float]:
        """Select the k largest, exactly; equal ones go to the lowest index, and NaN is larger than infinity.

        Returns
        -------
        selection : Selection
            Ascending by index.
        threshold : float
            Magnitude of the smallest of them.
        """
        selection = self._selection(k)
        array = self._accumulated.array()
        if k // 4 < self.listed < k:
            self._list_more(k)
        if k <= self.listed:
            index, bits = self.region.index[: self.listed], self.region.bits[: self.listed]
            scratch = self._workspace.array(f"{self._name}.scratch", self.listed, self._word)
            threshold = cpu.select_candidates(index, bits, scratch, array, *_arrays(selection))
        else:
            threshold = cpu.kth_magnitude(self.array, k)
            cpu.select_largest(self.array, threshold, *_arrays(selection))
            if self.part.start:
                selection.indices[:] += np.uint32(self.part.start)
        return selection, cpu.magnitude_of(threshold, self._accumulated.dtype)

    def bound_for_next(self, k: int, threshold: float, before: float) -> float:
        """Return the bound for the next step's candidates, where `largest` was asked for k elements in this one.

        It is meant to list half as many again. Under error feedback elements crowd below the threshold, so that no
        fixed fraction of it would do, and for the first few hundred steps it rises.

        Parameters
        ----------
        k, threshold : int, float
            What was asked for, and what it gave.
        before : float
            Threshold of the step before; 0 where there was none.
        """
        listed, found = self.listed, self.region.found
        if listed == 0 and found > k:  # too many to be stored: as if they were spread evenly
            bound = cpu.magnitude_of(self.region.bound, self._accumulated.dtype)
            return threshold - (threshold - bound) * 0.5 * k / (found - k)
        if listed < k:
            return 0.97 * threshold
        place = max(0, listed - k - k // 2)
        spare = self._workspace.array(f"{self._name}.scratch", listed, self._word)[: listed - k + 1]
        spare.partition(place)  # `largest` left the k largest behind these
        lower = cpu.magnitude_of(int(spare[place]), self._accumulated.dtype)
        if listed < k + k // 2:
            lower *= 0.98
        return lower * (min(max(threshold / before, 0.8), 1.2) if before > 0 else 1.0)

    def _list_more(self, wanted: int) -> None:
        """List again with a lower bound, which takes a fraction of the time of a radix selection."""
        region, array = self.region, self.array
        dtype = self._accumulated.dtype
        for factor in (0.95, 0.7):
            bound = factor * cpu.magnitude_of(region.bound, dtype)
            found = cpu.select_above(array, bound, self.part.start, region.index, region.bits.view(dtype), 0)
            region.found, region.bound = found, cpu.magnitude_bits(bound, dtype) + 1
            region.bits[:found] &= cpu.mask_of(dtype)
            if found >= wanted:
                return

    def _covers(self, threshold: float) -> bool:
        return self.listed > 0 and cpu.magnitude_bits(threshold, self._accumulated.dtype) >= self.region.bound

    def _selection(self, room: int) -> Selection:
        workspace, dtype = self._workspace, self._accumulated.dtype
        return Selection(
            workspace.array(f"{self._name}.indices", room, np.uint32),
            workspace.array(f"{self._name}.values", room, dtype),
        )


def _arrays(selection: Selection) -> tuple[NDArray[np.uint32], NDArray[np.floating]]:
    return selection.indices, selection.values
