"""Large elements, listed in the sweep that makes the sum, and queries that need no further sweep."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated, Region
from mpicomp.compressors.context import Context
from mpicomp.compressors.wire_format import Selection
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu

_WORDS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.uint64),
}


class Candidates:
    """The elements of a part of a bucket from a bound on, and answers that hold for all of its elements.

    The bound is a magnitude from an earlier step; 0 lists nothing. Questions above it are answered from the list of at
    most ``room`` elements, others by a sweep over the array: the answers are the same. ``place`` numbers the part.
    """

    def __init__(
        self, accumulated: Accumulated, scope: Context, bound: float, room: int, part: slice, place: int
    ) -> None:
        self._accumulated = accumulated
        self._workspace = workspace = scope.workspace
        self._name = name = f"candidates.{place}"
        self.part = part
        self.numel: int = part.stop - part.start
        """Number of elements of this part."""
        self._word = word = _WORDS[accumulated.dtype]
        self._scratch: NDArray[Any] | None = None  # listed magnitudes, the k largest last, once k were selected
        room = min(room, self.numel) if bound > 0 else 0
        index, bits = workspace.scratch(name + ".index", room, np.uint32), workspace.scratch(name + ".bits", room, word)
        bound_bits = cpu.magnitude_bits(bound, accumulated.dtype) if room else 0
        self.region = Region(part.start, part.stop, bound_bits, index, bits)

    @property
    def moments(self) -> cpu.Moments:
        """Moments of the whole sum, whatever part of it this is."""
        return self._accumulated.moments

    @property
    def array(self) -> NDArray[np.floating]:
        """The part of the sum."""
        return self._accumulated.array()[self.part]

    @property
    def listed(self) -> int:
        """Number of elements in the list; 0 if they did not fit."""
        region = self.region
        return region.found if region.found <= region.index.size else 0

    @property
    def _listed_values(self) -> NDArray[np.floating]:
        """Magnitudes of the elements in the list."""
        return self.region.bits[: self.listed].view(self._accumulated.dtype)

    def count(self, threshold: float) -> int:
        """Count the elements above a threshold."""
        if self._covers(threshold):
            [count] = to_python(kernels.tail(self._listed_values, threshold).count)
        else:
            [count] = to_python(kernels.tail(self.array, threshold, 1, self._accumulated.threads).count)
        return int(count)

    def tail(self, threshold: float, stride: int = 1) -> cpu.Tail:
        """Count the elements above a threshold, and sum their excess, in the array: a list would round differently."""
        return cpu.Tail(*to_python(*kernels.tail(self.array, threshold, stride, self._accumulated.threads)))

    def logarithms(self, stride: int) -> tuple[int, float, float]:
        """Sum magnitudes and their logarithms; see `mpicomp.kernels.cpu.logarithms`."""
        count, total, logarithm = to_python(*kernels.logarithms(self.array, stride, self._accumulated.threads))
        return count, total, logarithm

    def top(self) -> float:
        """Return the largest magnitude."""
        listed = self.region.bits[: self.listed]
        [bits] = to_python(listed.max() if self.listed else kernels.kth_magnitude(self.array, 1))
        return cpu.magnitude_of(int(bits), self._accumulated.dtype)

    def above(self, threshold: float, room: int, known: bool = False) -> Selection:
        """Select the elements above a threshold; ``room`` is their number, expected, or ``known`` from a count."""
        listed = self.listed if self._covers(threshold) else 0
        selection = self._selection(listed or max(1, room))
        if listed:
            index, bits = self.region.index[:listed], self.region.bits[:listed]
            found = kernels.select_listed(index, bits, threshold, self._accumulated.array(), *_arrays(selection))
        else:
            found = kernels.select_above(self.array, threshold, self.part.start, *_arrays(selection), 0)
        [count] = [room] if known else to_python(found)
        if count > selection.indices.size:
            selection = self._selection(count)
            kernels.select_above(self.array, threshold, self.part.start, *_arrays(selection), 0)
        return Selection(selection.indices[:count], selection.values[:count])

    def largest(self, k: int) -> tuple[Selection, float]:
        """Select the k largest, exactly; return them, ascending by index, and the smallest of their magnitudes.

        Of equal magnitudes the lower index goes first, and NaN is larger than infinity.
        """
        selection, threshold = self.select(k)
        [bits] = to_python(threshold)
        return selection, cpu.magnitude_of(bits, self._accumulated.dtype)

    def select(self, k: int) -> tuple[Selection, int]:
        """Select as `largest` does, but return magnitude bits as kernels do: on a device, as a 0-d array."""
        selection, accumulated, region = self._selection(k), self._accumulated, self.region
        array, kernels = accumulated.array(), accumulated.kernels
        listed = region.found if region.found <= region.index.size else 0
        if k // 4 < listed < k:
            self._list_more(k)
            listed = self.listed
        if k <= listed:
            self._scratch = scratch = self._workspace.scratch(self._name + ".scratch", listed, self._word)
            index, bits = region.index[:listed], region.bits[:listed]
            threshold = kernels.select_candidates(index, bits, scratch, array, selection.indices, selection.values)
        else:
            threshold = kernels.kth_magnitude(self.array, k)
            kernels.select_largest(self.array, threshold, selection.indices, selection.values)
            if self.part.start:
                np.add(selection.indices, np.uint32(self.part.start), out=selection.indices)
        return selection, threshold

    def spare(self, k: int) -> int:
        """Return the magnitude bits of the candidate of rank 3 k / 2, or of the last; 0 for fewer than k candidates."""
        scratch, rank = self._scratch, k + k // 2
        if scratch is None:
            return 0
        listed = scratch.size
        if isinstance(scratch, np.ndarray):  # which `select` has left in two parts: a radix selection takes longer
            if listed <= rank:
                return int(scratch[: listed - k].min(initial=scratch[listed - k]))
            if k < rank:
                scratch[: listed - k].partition(listed - rank)
            return int(scratch[listed - rank])
        bits: int = kernels.kth_magnitude(self._listed_values, min(listed, rank))
        return bits

    def bound_for_next(self, k: int, threshold: float, before: float, spare: int) -> float:
        """Return the bound of the next step's candidates, which is meant to list half as many again as k.

        Under error feedback elements crowd below the threshold, so that no fixed fraction of it would do, and for the
        first few hundred steps it rises. ``before`` is the threshold of the step before or 0.
        """
        found = self.region.found
        listed = found if found <= self.region.index.size else 0
        if listed == 0 and found > k:  # too many to be stored: assume that they are spread evenly
            bound = cpu.magnitude_of(self.region.bound, self._accumulated.dtype)
            return threshold - (threshold - bound) * 0.5 * k / (found - k)
        if listed < k:
            return 0.97 * threshold
        lower = cpu.magnitude_of(spare, self._accumulated.dtype)
        if listed < k + k // 2:
            lower *= 0.98
        return lower * (min(max(threshold / before, 0.8), 1.2) if before > 0 else 1.0)

    def _list_more(self, wanted: int) -> None:
        """List again with a lower bound, which takes a fraction of the time of a radix selection."""
        region, array = self.region, self.array
        dtype = self._accumulated.dtype
        for factor in (0.95, 0.7):
            bound = factor * cpu.magnitude_of(region.bound, dtype)
            count = kernels.select_above(array, bound, self.part.start, region.index, region.bits.view(dtype), 0)
            [found] = to_python(count)
            region.found, region.bound = found, cpu.magnitude_bits(bound, dtype) + 1
            listed = region.bits[:found]
            np.bitwise_and(listed, cpu.mask_of(dtype), out=listed)
            if found >= wanted:
                return

    def _covers(self, threshold: float) -> bool:
        return self.listed > 0 and cpu.magnitude_bits(threshold, self._accumulated.dtype) >= self.region.bound

    def _selection(self, room: int) -> Selection:
        workspace, dtype = self._workspace, self._accumulated.dtype
        indices = workspace.array(self._name + ".indices", room, np.uint32)
        return Selection(indices, workspace.array(self._name + ".values", room, dtype))


def list_candidates(
    accumulated: Accumulated, context: Context, parts: Sequence[tuple[slice, float, int]]
) -> list[Candidates]:
    """Return the candidates of each part (slice, bound, room), listed while the sum is computed, if that is now."""
    found, regions = [], []
    for place, (part, bound, room) in enumerate(parts):
        candidates = Candidates(accumulated, context, bound, room, part, place)
        found.append(candidates)
        if candidates.region.bound > 0:
            regions.append(candidates.region)
    if not accumulated.is_computed:
        accumulated.sweep(regions)
    return found


def _arrays(selection: Selection) -> tuple[NDArray[np.uint32], NDArray[np.floating]]:
    return selection.indices, selection.values
