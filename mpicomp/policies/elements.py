"""What a bucket's elements are like: how large their gradients are, and how much of them is signal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.kinds import Quantiser
from mpicomp.device import current_device
from mpicomp.policies.behind import behind_at_random, behind_of_all, behind_of_selections, behind_of_waiting
from mpicomp.workspace import Workspace

_SAMPLE = 1 << 14  # elements of a bucket that are followed, at most: their classes are known to some percent
_TOP = 15  # logarithm of the largest square of a scale over that of all
_CLASSES = 40  # of elements by scale, two for every power of two, from there down
_LARGEST = 1e38  # energy that float32 can tell
_MEMORY = 0.1  # weight of a look in running means; the first ones count alike
_LOOKS = 10  # looks until scales are known: the first ones take one gradient's magnitude for its scale
_LEAST = 1e-4  # least share of signal: some thousand elements in some dozen looks resolve no less


class ElementSurvey:
    """Follows some elements of a bucket: running means of their squares, and of products of two gradients in a row.

    These are of different batches, so that what they have in common on one rank is signal, even where ranks have data
    of different kinds. A look that does not follow on another one tells nothing yet. Elements are classed by the root
    of their mean square, their scale, over that of all: gradients become smaller as training goes on. What quantisers
    send of them, and what waits, is found by packing them, each with a residual of its own.

    Parameters
    ----------
    numel : int
        Elements of the bucket.
    quantisers : sequence of Quantiser
        The quantisers that are tried.
    """

    def __init__(self, numel: int, quantisers: Sequence[Quantiser] = ()) -> None:
        self._places = np.arange(numel)
        if numel > _SAMPLE:
            self._places = np.unique(np.random.default_rng(numel).integers(0, numel, _SAMPLE))
        self._quantisers = tuple(quantisers)
        self._workspace = Workspace()
        self._residuals = [np.zeros(self._places.size, np.float32) for _ in quantisers]
        self._before = np.zeros(self._places.size, np.float32)
        self._squares = np.zeros(self._places.size, np.float32)
        self._products = np.zeros(self._places.size, np.float32)
        self._looks = self._pairs = 0
        self._last = -2  # step of the look before

    def width(self, sizes: Sequence[int]) -> int:
        """See `Survey.width`: the elements followed or 0, then each class's sums over their mean square."""
        return 1 + (3 + 2 * len(self._quantisers)) * _CLASSES

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        """See `Survey.measure`; one object looks at one bucket."""
        device = current_device()
        places = device.to_device(self._places)
        with np.errstate(invalid="ignore"):
            followed = accumulated[places] if residual is None else accumulated[places] - residual[places]
        now = device.to_host(followed).astype(np.float32)
        told = np.zeros(self.width(sizes), np.float32)
        if not float(np.abs(now).max(initial=0.0)) ** 2 * now.size < _LARGEST or not now.size:
            return told
        self._looks += 1
        weight = max(_MEMORY, 1 / self._looks)
        self._squares += weight * (now * now - self._squares)
        follows, self._last = step == self._last + 1, step
        if follows:
            self._products += max(_MEMORY, 1 / (self._pairs + 1)) * (now * self._before - self._products)
            self._pairs += 1
        self._before = now
        sums = [np.ones_like(now), self._squares, self._products]
        for quantiser, waiting in zip(self._quantisers, self._residuals, strict=True):
            sent = self._workspace.array("sent", now.size, now.dtype)
            waiting += now
            quantiser.pack(
                waiting, self._workspace.array("message", quantiser.packed_bytes(now.size), np.uint8), sent, step
            )
            waiting -= sent
            sums += [sent * sent, waiting * waiting]
        mean, changes = float(self._squares.mean()), self._squares > 0
        if follows:
            told[0] = now.size
        if follows and mean > 0:
            classes = np.floor(np.log2(self._squares[changes] / mean)).astype(np.int64) + _CLASSES - _TOP
            classes = np.clip(classes, 0, _CLASSES - 1)
            counts, *energies = [np.bincount(classes, own[changes], _CLASSES) for own in sums]
            told[1:] = np.concatenate([counts, *(own / mean for own in energies)])
        return told

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> None:
        """See `Survey.energies`: of layers it tells nothing."""


@dataclass
class Elements:
    """Scales and signal of a bucket's elements, learnt from all ranks' surveys; the same on all ranks.

    Attributes
    ----------
    numel : int
        Elements of the bucket.
    quantisers : int
        Number of quantisers that surveys try.
    normalises : bool
        Whether an optimizer divides what arrives by the root of its mean square, as Adam does.
    looks : int
        Surveys that were taken up.
    """

    numel: int
    quantisers: int = 0
    normalises: bool = True
    looks: int = 0

    def __post_init__(self) -> None:
        self._followed = 1.0
        self._sums = np.zeros((3 + 2 * self.quantisers, _CLASSES))

    @property
    def known(self) -> bool:
        """Whether there were enough looks; where there are no elements none is needed."""
        return self.looks >= _LOOKS or self.numel == 0

    @property
    def idle(self) -> bool:
        """Whether there was nothing but zeros in them."""
        return not self._sums[1].any()

    def observe(self, told: NDArray[np.float32]) -> None:
        """Learn from the surveys of all ranks, shape (ranks, width)."""
        rows = told[told[:, 0] > 0].astype(np.float64)
        if not rows.size:
            return
        self.looks += 1
        self._followed = float(rows[:, 0].sum())
        weight = max(_MEMORY, 1 / self.looks)
        self._sums += weight * (rows[:, 1:].sum(axis=0).reshape(self._sums.shape) - self._sums)

    @property
    def signal(self) -> float:
        """Share of signal in the energy of a rank's gradient."""
        if self.idle:
            return _LEAST
        shares, scales, signals = self._classes()
        energies = shares * scales * scales
        return float((energies * signals).sum() / energies.sum())

    def behind(
        self, ratios: NDArray[np.float64], ranks: int, age: float, by_magnitude: bool = True
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the shares of steps by which selections at some ratios fall behind; see `behind_of_selections`."""
        if self.idle:
            return np.zeros(ratios.size), np.zeros(ratios.size)
        if by_magnitude:
            return behind_of_selections(*self._classes(), ratios, ranks, age, self.normalises)
        drawn = behind_at_random(*self._classes(), ratios, ranks, age, self.normalises)
        return drawn, drawn

    def behind_with(self, quantiser: int, ranks: int, age: float) -> float:
        """Return the share of steps by which one of the quantisers falls behind; see `behind_of_all`."""
        if self.idle:
            return 0.0
        there = self._sums[1] > 0
        sent, waiting = self._sums[3 + 2 * quantiser : 5 + 2 * quantiser, there] / self._sums[1, there]
        return behind_of_all(*self._classes(), sent, waiting, ranks, age, self.normalises)

    def behind_after(self, late: float, ranks: int, age: float) -> float:
        """Return the share of steps that is lost where all elements wait so long; see `behind_of_waiting`."""
        return behind_of_waiting(late, self.signal, ranks, age, self.normalises)

    def _classes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return the share of all elements, the relative scale and the share of signal of each class that has any."""
        counts, energies, products, *_ = self._sums[:, self._sums[1] > 0]
        return counts / self._followed, np.sqrt(energies / counts), np.clip(products / energies, _LEAST, 1)

    def state(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, JSON-able."""
        sums = self._sums.tolist()
        return {"looks": self.looks, "followed": self._followed, "sums": sums}

    def give(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned, of as many quantisers."""
        sums = np.array(state["sums"], float)
        if sums.shape == self._sums.shape:
            self.looks, self._followed = int(state["looks"]), float(state["followed"])
            self._sums = sums
