"""The base class of compressors that estimate the threshold above which k elements lie, and the search they share."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.candidates import list_candidates
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import current_device
from mpicomp.kernels import cpu

_ROOM = 4  # candidates that can be stored, as a multiple of k
_MANY = 3  # candidates, as a multiple of those sent, from which on the gap between bound and threshold is halved
_GAP = 0.1  # first gap; it adapts, since elements crowd below the threshold under error feedback
_WIDEST = 0.5  # largest gap, as a share of the threshold
_NARROWEST = 1e-6  # smallest gap, as a share of the threshold
_LIMIT = 4  # times k: more elements than that and _SLACK are never sent
_SLACK = 1024  # elements: sending so many too many costs nothing
_FORESEEN = 8  # thresholds that are counted in one sweep


def most_of(k: int) -> int:
    """Return how many elements are ever sent where k are wanted."""
    return _LIMIT * k + _SLACK


class Search:
    """Count and select the elements of an array above a threshold, for a compressor that is to send k of them.

    On the host elements are listed in the sweep that makes the sum, by a bound from the step before; counts and
    selections never depend on it. On a device the host waits longer for a number than a sweep takes: nothing is listed,
    and likely counts are computed beforehand and read at once. ``name`` is the bound's key in the memory, ``ranks`` are
    those of the magnitudes that `magnitude` returns.
    """

    def __init__(
        self, name: str, accumulated: GradientWithResidual, context: Context, k: int, ranks: Sequence[int] = ()
    ) -> None:
        self.accumulated = accumulated
        self.k = k
        self.room = _ROOM * k  # elements that can be listed
        self._name = name
        self.memory = context.memory
        self.waits = current_device().number is not None  # whether the host waits for every number
        self._bound = 0.0 if self.waits else context.memory.get(f"{name}.bound", 0.0)
        whole = slice(0, accumulated.numel), self._bound, self.room
        [self.candidates] = list_candidates(accumulated, context, [whole])
        self._found = self.candidates.region.found
        self._counts: dict[float, int] = {}  # by threshold
        self._magnitudes: dict[int, float] = {}  # by rank
        if self.waits and ranks:
            array, dtype = accumulated.array(), accumulated.dtype
            bits = accumulated.to_host(*(kernels.kth_magnitude(array, rank) for rank in ranks))
            self._magnitudes = {rank: cpu.magnitude_of(word, dtype) for rank, word in zip(ranks, bits, strict=True)}

    @property
    def numel(self) -> int:
        """Elements of the array."""
        return self.accumulated.numel

    @property
    def mean(self) -> float:
        """Mean magnitude."""
        return self.accumulated.moments.total / self.numel

    def top(self) -> float:
        """Return the largest magnitude; 1 has to be among the ranks that the search was made with."""
        return self.magnitude(1) if self.waits else self.candidates.top()

    def magnitude(self, rank: int) -> float:
        """Return the magnitude of one of the search's ranks, of which 1 is the largest; only if it `waits`."""
        return self._magnitudes[rank]

    def foresee(self, thresholds: Iterable[float]) -> None:
        """Count above the first eight of the thresholds that may be needed, if numbers are waited for."""
        if self.waits:
            fitted = [self._fitted(threshold) for threshold in islice(thresholds, _FORESEEN)]
            counts = self.accumulated.to_host(*kernels.counts_above(self.accumulated.array(), fitted))
            self._counts.update(zip(fitted, map(int, counts), strict=True))

    def count(self, threshold: float, enough: int) -> int:
        """Count the elements above a threshold; any result from ``enough`` on may stand for a larger one."""
        listed, dtype = self.candidates.listed, self.accumulated.dtype
        threshold = self._fitted(threshold)
        if threshold in self._counts:
            return self._counts[threshold]
        if listed >= enough and cpu.magnitude_bits(threshold, dtype) < self.candidates.region.bound:
            return listed
        return self.candidates.count(threshold)

    def above(self, threshold: float, bounded: bool = True) -> Selection:
        """Select the elements above a threshold; if ``bounded`` the k largest in place of none or over 4 k + 1024."""
        if not 0 < threshold < math.inf:
            return self.largest()
        threshold = self._fitted(threshold)
        most = most_of(self.k) if bounded else self.numel
        count = self.count(threshold, most + 1)
        if bounded and not 0 < count <= most:
            return self.largest()
        self.remember(threshold, count)
        return self.candidates.above(threshold, count, known=True)

    def largest(self) -> Selection:
        """Select the k largest, exactly, without zeros."""
        k = min(self.k, self.accumulated.moments.nonzero)
        if k == 0:
            return Selection(current_device().empty(0, np.uint32), current_device().empty(0, self.accumulated.dtype))
        return self.exactly(k)

    def exactly(self, k: int) -> Selection:
        """Select the k largest, exactly; zeros if there are not enough others."""
        if self.waits:  # no list needs the threshold as its bound
            return self.candidates.select(k)[0]
        selection, threshold = self.candidates.largest(k)
        self.remember(threshold, k)
        return selection

    def remember(self, threshold: float, count: int) -> None:
        """Keep a bound for the next step, given the threshold of this step and the number of selected elements."""
        if not 0 < threshold < math.inf:
            return
        gap = self.memory.get(f"{self._name}.gap", _GAP)
        if self._bound > 0 and self._found < count:
            gap = min(_WIDEST, 2 * gap)
        elif self._found > _MANY * count:
            gap = max(_NARROWEST, gap / 2)
        self.memory[f"{self._name}.gap"] = gap
        self.memory[f"{self._name}.bound"] = (1 - gap) * threshold

    def _fitted(self, threshold: float) -> float:
        return min(threshold, float(np.finfo(self.accumulated.dtype).max))


@dataclass(frozen=True, repr=False)
class Estimator(Sparsifier):
    """A sparsifier that estimates the magnitude that k elements exceed, and sends the elements above it.

    To add one: derive from it and implement `threshold`. Messages stay bounded: if the estimate selects nothing or more
    than 4 k + 1024 elements, or if some element is not finite, exactly the k largest are sent. Of an array of zeros
    nothing is sent.

    Parameters
    ----------
    ratio : float
        Intended kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    """

    ranks: ClassVar[Sequence[int]] = ()
    """Ranks of the magnitudes that `threshold` reads."""

    @property
    def bounded(self) -> bool:
        """Whether the k largest are sent in place of none or too many."""
        return True

    ratio: float = 0.01

    def select(self, accumulated: GradientWithResidual, context: Context) -> Selection:
        search = Search(self.id, accumulated, context, num_kept(self.ratio, accumulated.numel), self.ranks)
        if not accumulated.finite:
            return search.largest()
        return search.above(self.threshold(search), self.bounded)

    @abstractmethod
    def threshold(self, search: Search) -> float:
        """Estimate the magnitude that about ``search.k`` elements exceed; NaN if that is unknown."""
