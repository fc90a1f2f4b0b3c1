"""The share of signal in a gradient: the part common to all ranks' batches; the rest is noise of the batch."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mpicomp.places import here

_WIDTH = 256  # numbers in a sketch
_SAMPLED = 1 << 18  # elements from which on only a part of a gradient is sketched
_STRIDE = 64  # of a gradient that long one group of elements in this many is sketched
_LEARN = 0.1  # weight of a new measurement in the running average; the first ones count alike
_LEAST = 0.005  # smallest share of signal: a sketch cannot resolve less
_MOST = 1.0  # largest share of signal


class SketchSurvey:
    """Sums with random signs, the same ones on all ranks: of ranks' sum as good a picture as of each of them.

    The squared norm of a sketch is that of the array in expectation, and a sum of ranks' sketches is the sketch of
    their sum, so that the energies of every rank's gradient and of their mean come from a kilobyte a rank, each to
    about a tenth. (A count sketch of one row; Charikar, Chen and Farach-Colton 2002.)
    """

    def width(self, sizes: Sequence[int]) -> int:
        """See `Survey.width`."""
        return _WIDTH

    def measure(self, accumulated: NDArray[np.floating], sizes: Sequence[int], step: int) -> NDArray[np.float32]:
        """See `Survey.measure`."""
        whole = accumulated.size // _WIDTH * _WIDTH
        groups = accumulated[:whole].reshape(-1, _WIDTH)
        stride = _STRIDE if accumulated.size >= _SAMPLED else 1
        groups = groups[step % stride :: stride]
        place = here()
        signs = place.bring(_signs(groups.size + _WIDTH, step))
        rest = accumulated[whole:]
        with np.errstate(over="ignore", invalid="ignore"):
            sketch = np.einsum("ij,ij->j", groups, signs[_WIDTH:].reshape(-1, _WIDTH)).astype(np.float32)
            sketch[: rest.size] += signs[: rest.size] * rest
            return place.to_host(sketch * np.float32(np.sqrt(stride)))

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> None:
        """See `Survey.energies`: of layers it tells nothing."""


def _signs(count: int, seed: int) -> NDArray[np.float32]:
    bits = np.unpackbits(np.frombuffer(np.random.default_rng(seed).bytes(-(-count // 8)), np.uint8), count=count)
    signs: NDArray[np.float32] = 2 * bits.astype(np.float32) - 1
    return signs


class Signal:
    """The share of signal in the energy of a gradient, learnt from sketches of accumulated ones.

    Ranks have batches of their own: of N independent noises the mean has an N-th of the energy, while the signal is in
    all of them and in their mean. (The gradient noise scale; McCandlish et al. 2018, arXiv 1812.06162.) What has been
    waiting in a residual adds up: noise by its energy, signal by its amplitude. So in gradients that are late by d
    steps, a share s of signal shows as ``(1 + d) s / (1 + d s)``.

    Attributes
    ----------
    share : float or None
        In (0, 1]; None before anything is known.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        self._mean = 0.0  # which may be below 0, as noise is
        self._looks = 0

    def observe(self, sketches: Mapping[int, NDArray[np.float32]], delay: float) -> None:
        """Learn from the sketches of all buckets, by bucket, shape (ranks, width), of gradients that are late."""
        tables = [own.astype(np.float64) for own in sketches.values()]
        ranks = len(tables[0])
        each = sum(float((own * own).sum()) for own in tables)
        mean = sum(float((own.mean(axis=0) ** 2).sum()) for own in tables)
        if not 0 < each < np.inf or not np.isfinite(mean):
            return
        shown = (ranks * mean / each - 1 / ranks) / (1 - 1 / ranks)
        share = shown / (1 + delay - delay * min(shown, 1.0))
        self._looks += 1
        self._mean += max(_LEARN, 1 / self._looks) * (share - self._mean)
        self.share = min(max(self._mean, _LEAST), _MOST)

    def state(self) -> float | None:
        """Return the state that has to survive a restart, JSON-able."""
        return self.share

    def give(self, share: float | None) -> None:
        """Restore the state that `state` returned; it counts as much as all looks since."""
        if share is not None:
            self.share = self._mean = float(share)
            self._looks = round(1 / _LEARN)
