"""Mutual information and correlation between the gradients of two ranks, layer by layer.

Abrahamyan et al. (LGC, arXiv 2103.08870, section III) estimate from histograms how much of the entropy of a layer's
gradient on one worker is shared with that on another. Different here, since the paper does not print its bins, and what
comes out depends on them:

- Bins hold equally many elements of each array. Gradients have long tails, and nearly all of them would lie in one or
  two bins of equal width. All layers have the same number of bins, so that their shares can be compared.
- An estimate from few elements is too high, about ``(bins - 1)**2 / (2 elements)`` nats. So the same is estimated with
  the other rank's elements in random order, between which nothing is shared: this is the control.

Information also counts what two gradients share without pointing in the same direction: it is above its control where
large elements of one lie where those of the other are large, whatever their signs. The correlation is about directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from mpicomp.bench.measure.results import plain
from numpy.typing import NDArray

from mpicomp.rounds import Group, Round, Rounds

BINS = 16  # number of bins of each of the two arrays
LEAST = BINS**2
"""Fewest elements of a layer that is looked at: for fewer the control is as high as the information to be found."""

Value = TypeVar("Value")

_FIELDS = ("correlation", "information", "control", "entropy")


@dataclass(frozen=True)
class Common:
    """Correlation and mutual information of two arrays, or means over several pairs."""

    correlation: float  # Pearson's correlation coefficient
    information: float  # mutual information in nats an element, estimated from a histogram
    control: float  # the same estimate where nothing is shared: the bias of the estimate
    entropy: float  # entropy of the histogram's two marginals, in nats; the mean of both

    @property
    def share(self) -> float:
        """The information's share of the entropy, as in the paper; 0 where there is no entropy."""
        return self.information / self.entropy if self.entropy > 0 else 0.0

    @property
    def control_share(self) -> float:
        return self.control / self.entropy if self.entropy > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in _FIELDS}
        return fields | {"share": self.share, "control_share": self.control_share}


def common(one: NDArray[np.floating], other: NDArray[np.floating], random: np.random.Generator) -> Common:
    """Compare two arrays, element by element.

    >>> array = np.arange(1000.0)
    >>> found = common(array, -array, np.random.default_rng(0))
    >>> round(found.correlation, 6), round(found.share, 6), found.control_share < 0.1
    (-1.0, 1.0, True)
    """
    left, right = _bins(one), _bins(other)
    table = _table(left, right)
    return Common(
        correlation=_pearson(one, other),
        information=_information(table),
        control=_information(_table(left, random.permutation(right))),
        entropy=(_entropy(table.sum(axis=1)) + _entropy(table.sum(axis=0))) / 2,
    )


def _bins(array: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return the bin of every element. Zeros by the thousand have one for themselves, and then there are fewer."""
    edges = np.quantile(array, np.arange(1, BINS) / BINS)
    repeated = edges[1:][edges[1:] == edges[:-1]]
    edges = np.unique(np.concatenate([edges, np.nextafter(repeated, np.inf)]))
    return np.searchsorted(edges, array, side="right")


def _table(left: NDArray[np.intp], right: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the share of elements in each pair of bins."""
    counts = np.bincount(left * BINS + right, minlength=BINS * BINS)
    return counts.reshape(BINS, BINS) / left.size


def _information(table: NDArray[np.float64]) -> float:
    return max(0.0, _entropy(table.sum(axis=1)) + _entropy(table.sum(axis=0)) - _entropy(table.ravel()))


def _entropy(shares: NDArray[np.float64]) -> float:
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum())


def _pearson(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    left, right = one - one.mean(dtype=np.float64), other - other.mean(dtype=np.float64)
    norms = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(np.dot(left, right)) / norms if norms > 0 else 0.0


@dataclass(frozen=True)
class Correlations:
    """Correlation and mutual information of ranks' gradients in a run."""

    every: int  # steps from one look to the next
    looks: int  # number of looks; those at gradients that were not finite do not count
    whole: Common | None  # mean over layers, by their elements; None where no layer was looked at
    layers: dict[str, tuple[int, Common]]  # by name: elements, and the mean over looks and pairs of ranks

    def to_json(self) -> dict[str, Any]:
        layers = [{"name": name, "numel": numel} | layer.to_json() for name, (numel, layer) in self.layers.items()]
        whole = None if self.whole is None else self.whole.to_json()
        return {"every": self.every, "looks": self.looks, "bins": BINS, "whole": whole, "layers": layers}

    def table(self) -> str:
        if self.whole is None:
            return f"what ranks' gradients have in common: no look at a layer of at least {LEAST} finite elements"
        rows = [(f"  {name}", f"{numel:,}", *_cells(layer)) for name, (numel, layer) in self.layers.items()]
        rows.append(("  all of them", f"{sum(numel for numel, _ in self.layers.values()):,}", *_cells(self.whole)))
        header = ("what ranks' gradients have in common", "elements", "correlation", "information", "control")
        return plain(header, rows, (True, False, False, False, False))


def _cells(common: Common) -> tuple[str, str, str]:
    return f"{common.correlation:.3f}", f"{100 * common.share:.1f} %", f"{100 * common.control_share:.1f} %"


class Comparison:
    """Compares each rank's gradients with the next rank's, now and then in a run."""

    def __init__(self, every: int, seed: int, group: Group) -> None:
        self._every = every
        self._seed = seed
        self._group = group
        self._looks = 0
        self._numels: dict[str, int] = {}
        self._sums: dict[str, NDArray[np.float64]] = {}

    def look(self, step: int, gradients: Mapping[str, NDArray[np.floating]]) -> Rounds[None]:
        """Compare the gradients of a step, if it is time: all of them go to one rank. As rounds."""
        if step % self._every:
            return
        rank, size = self._group.rank, self._group.size
        flat = np.concatenate([array.ravel() for array in gradients.values()])
        peers = ((rank - 1) % size, (rank + 1) % size)
        task = Round("sendrecv", (flat.size, flat.size), flat.dtype, send=flat, recv=np.empty_like(flat), peers=peers)
        other: NDArray[np.floating] = yield task
        finite = yield from self._everyones(np.array([np.isfinite(flat).all()], np.float64))
        if not finite.all():
            return
        self._looks += 1
        random = np.random.default_rng([self._seed, step, rank])
        start = 0
        for name, array in gradients.items():
            stop = start + array.size
            if array.size >= LEAST:
                found = common(flat[start:stop], other[start:stop], random)
                self._numels[name] = array.size
                sums = self._sums.setdefault(name, np.zeros(len(_FIELDS)))
                sums += [getattr(found, field) for field in _FIELDS]
            start = stop

    def outcome(self) -> Rounds[Correlations]:
        """Return the means over looks and pairs, the same on all ranks. As rounds."""
        sums = np.array(list(self._sums.values())).reshape(-1)
        everyones = yield from self._everyones(sums)
        means = everyones.mean(axis=0).reshape(-1, len(_FIELDS)) / max(1, self._looks)
        layers = {
            name: (numel, Common(*values.tolist()))
            for (name, numel), values in zip(self._numels.items(), means, strict=True)
        }
        weights = np.array(list(self._numels.values()), float)
        whole = Common(*(weights @ means / weights.sum()).tolist()) if layers else None
        return Correlations(self._every, self._looks, whole, layers)

    def _everyones(self, array: NDArray[np.float64]) -> Rounds[NDArray[np.float64]]:
        size = self._group.size
        task = Round("allgatherv", [array.size] * size, array.dtype, send=array, recv=np.empty(size * array.size))
        everyones: NDArray[np.float64] = (yield task).reshape(size, array.size)
        return everyones
