"""Elements above a magnitude: a fixed one, and what those compressors share that estimate one."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Scope, Selection, Sparsifier, check_range, check_ratio, kept
from mpicomp.compressors.candidates import Candidates
from mpicomp.compressors.registry import register_compressor
from mpicomp.kernels import cpu

_SHARE = 0.01  # what a fixed threshold is taken to keep where nothing is known yet

_ROOM = 8  # candidates that are stored, as a multiple of k
_MANY = 3  # candidates, as a multiple of what is sent, from which on the gap between bound and threshold is halved
_GAP = 0.1  # at first; under error feedback elements crowd below the threshold, so that no fixed one would do
_WIDEST, _NARROWEST = 0.5, 1e-6
_LIMIT = 4  # times k: more are never sent
_SLACK = 1024  # elements: below that a wrong estimate costs nothing


@register_compressor
@dataclass(frozen=True, repr=False)
class Threshold(Sparsifier):
    """Every element of at least a magnitude that stays the same over training.

    A top-k loses least in every step; a fixed threshold loses least over a whole training for the same number of
    elements sent, since more is sent when gradients are large. There is no k, so the size of messages follows the data,
    from nothing to the whole array.

    Parameters
    ----------
    limit : float
        Magnitudes from here on are sent. 0 sends whatever is not zero. What an element adds up to waits in the residual
        until it reaches the limit; where its gradients are independent, of mean zero and standard deviation s, that
        takes about ``(limit / s)**2`` steps. So ten standard deviations of a gradient's elements keep about 1 %, and
        the default does so for elements of about 0.001.
    wire, indices
        See `Sparsifier`.

    Notes
    -----
    The published reducer has 0.5 as its default, and compares gradients that are multiplied by the learning rate.

    Examples
    --------
    >>> Threshold(limit=0.5).count(1000) is None
    True
    """

    id: ClassVar[str] = "threshold"
    paper: ClassVar[str] = "hard threshold, Sahu et al. 2021, arXiv 2108.00951; on gradients without the learning rate"

    limit: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("threshold", "limit", self.limit, 0, math.inf)
        object.__setattr__(self, "limit", float(self.limit))

    def expected(self, numel: int) -> int:
        """Give 1 %: what the limit keeps is known only from the data."""
        return kept(_SHARE, numel)

    def select(self, accumulated: Accumulated, scope: Scope) -> Selection:
        """Select what reaches the limit; see `Sparsifier.select`."""
        below = _predecessor(self.limit, accumulated.dtype)
        room = scope.memory.get("threshold.room", self.expected(accumulated.numel))
        candidates = Candidates(accumulated, scope, below, 2 * room + _SLACK)
        if not accumulated.done:
            accumulated.sweep([candidates.region] if below > 0 else [])
        selection = candidates.above(below, room)
        scope.memory["threshold.room"] = selection.indices.size
        return selection


class Search:
    """An array and the number k of elements that are to be sent; how many exceed what, and a selection that is bounded.

    Elements are listed in the sweep that makes the sum, by a bound that is carried over from the step before, and
    answers come from that list where they can. They never depend on it.

    Parameters
    ----------
    name : str
        Under which the bound is remembered.
    accumulated : Accumulated
        What is selected from.
    scope : Scope
        Where the memory is.
    k : int
        From 1 to the array's length.
    """

    def __init__(self, name: str, accumulated: Accumulated, scope: Scope, k: int) -> None:
        self.accumulated = accumulated
        self.k = k
        self.room = _ROOM * k
        """Elements that can be listed."""
        self._name = name
        self._memory = scope.memory
        self._bound = scope.memory.get(f"{name}.bound", 0.0)
        self.candidates = Candidates(accumulated, scope, self._bound, self.room)
        if not accumulated.done:
            accumulated.sweep([self.candidates.region] if self._bound > 0 else [])
        self._found = self.candidates.region.found

    @property
    def numel(self) -> int:
        """Elements of the array."""
        return self.accumulated.numel

    @property
    def mean(self) -> float:
        """Mean magnitude."""
        return self.accumulated.moments.total / self.numel

    def top(self) -> float:
        """Give the largest magnitude."""
        return self.candidates.top()

    def count(self, threshold: float, enough: int) -> int:
        """Count what exceeds a threshold; where it is at least ``enough``, any number from there on may be given."""
        listed, dtype = self.candidates.listed, self.accumulated.dtype
        threshold = self._fitted(threshold)
        if listed >= enough and cpu.magnitude_bits(threshold, dtype) < self.candidates.region.bound:
            return listed
        return self.candidates.tail(threshold).count

    def above(self, threshold: float) -> Selection:
        """Select what exceeds a threshold; exactly the k largest where that is nothing, or more than 4 k + 1024."""
        if not 0 < threshold < math.inf:
            return self.largest()
        threshold = self._fitted(threshold)
        most = _LIMIT * self.k + _SLACK
        count = self.count(threshold, most + 1)
        if not 0 < count <= most:
            return self.largest()
        self.remember(threshold, count)
        return self.candidates.above(threshold, count)

    def largest(self) -> Selection:
        """Select the k largest, exactly, without zeros."""
        k = min(self.k, self.accumulated.moments.nonzero)
        if k == 0:
            return Selection(np.empty(0, np.uint32), np.empty(0, self.accumulated.dtype))
        selection, threshold = self.candidates.largest(k)
        self.remember(threshold, k)
        return selection

    def remember(self, threshold: float, count: int) -> None:
        """Keep a bound for the next step, given the magnitude above which this one has selected and how many."""
        if not 0 < threshold < math.inf:
            return
        gap = self._memory.get(f"{self._name}.gap", _GAP)
        if self._bound > 0 and self._found < count:
            gap = min(_WIDEST, 2 * gap)
        elif self._found > _MANY * count:
            gap = max(_NARROWEST, gap / 2)
        self._memory[f"{self._name}.gap"] = gap
        self._memory[f"{self._name}.bound"] = (1 - gap) * threshold

    def _fitted(self, threshold: float) -> float:
        return min(threshold, float(np.finfo(self.accumulated.dtype).max))


@dataclass(frozen=True, repr=False)
class Estimator(Sparsifier):
    """A sparsifier that estimates above which magnitude there are k elements, and sends what lies there.

    To add one: derive from it and give `threshold`.

    Messages stay bounded and nothing waits for ever: where the estimate selects nothing (of equal magnitudes none may
    exceed it) or more than 4 k + 1024 elements, and where there are infinities or NaN, exactly the k largest are sent.
    Of an array of zeros nothing is.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1] that is aimed at; k is the nearest integer to ``ratio * numel``, at least 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ratio", check_ratio(self.id, self.ratio))

    def select(self, accumulated: Accumulated, scope: Scope) -> Selection:
        """Select what exceeds the estimate; see `Sparsifier.select`."""
        search = Search(self.id, accumulated, scope, kept(self.ratio, accumulated.numel))
        if not accumulated.finite:
            return search.largest()
        return search.above(self.threshold(search))

    @abstractmethod
    def threshold(self, search: Search) -> float:
        """Estimate the magnitude above which there are about ``search.k`` elements; NaN where it cannot be told."""


def _predecessor(magnitude: float, dtype: np.dtype) -> float:
    """Give the magnitude before one: what exceeds it is what reaches that."""
    return cpu.magnitude_of(max(0, cpu.magnitude_bits(magnitude, dtype) - 1), dtype)
