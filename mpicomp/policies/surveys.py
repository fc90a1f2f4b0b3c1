"""What ranks measure of an accumulated gradient and tell each other now and then: the same table on all of them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels import cpu

BINS = 64
"""Bins that a layer's spectrum travels in: four for every power of two, from its largest magnitude down."""

_PER_BIN = 2  # of the kernel's bins, eight for every power of two
_ALL = cpu.BINS // _PER_BIN
_FINITE = 2040 // _PER_BIN  # bins from here on hold infinity and NaN
_WHOLE = 1 << 16  # elements; a shorter layer is looked at as a whole


class Survey(Protocol):
    """Measures layers of a bucket on one rank. Ranks send each other what it gives, whose length is the same on all."""

    def width(self, sizes: Sequence[int]) -> int:
        """Give how many numbers a bucket with layers of these sizes is measured in."""
        ...

    def measure(self, accumulated: NDArray[np.floating], sizes: Sequence[int], step: int) -> NDArray[np.float32]:
        """Measure a bucket, shape (width,).

        Parameters
        ----------
        accumulated : array, shape (sum of sizes,)
            Gradient plus residual of this rank; not to be written to.
        sizes : sequence of int
            Elements of its layers.
        step : int
            Which.
        """
        ...

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        """Give the squared L2 norm of each layer on this rank, from what was measured, shape (layers,)."""
        ...


class SpectrumSurvey:
    """Counts and energies of magnitudes in logarithmic bins, layer by layer.

    Parameters
    ----------
    stride : int
        1 looks at all elements of a layer; n at every n-th group of 1024 of them, other ones at every step.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._counts = np.empty(cpu.BINS, np.int64)
        self._energies = np.empty(cpu.BINS)

    def width(self, sizes: Sequence[int]) -> int:
        """See `Survey.width`: a layer takes its top bin, counts and energies."""
        return len(sizes) * (1 + 2 * BINS)

    def measure(self, accumulated: NDArray[np.floating], sizes: Sequence[int], step: int) -> NDArray[np.float32]:
        """See `Survey.measure`."""
        out = np.zeros((len(sizes), 1 + 2 * BINS), np.float32)
        start = 0
        for row, size in zip(out, sizes, strict=True):
            layer = accumulated[start : start + size]
            start += size
            stride = self._stride if size >= _WHOLE * self._stride else 1
            cpu.spectrum(layer[1024 * (step % stride) :], self._counts, self._energies, stride)
            counts = self._counts.reshape(_ALL, _PER_BIN).sum(axis=1)[:_FINITE]
            energies = self._energies.reshape(_ALL, _PER_BIN).sum(axis=1)[:_FINITE]
            filled = np.flatnonzero(energies)
            top = int(filled[-1]) if filled.size else BINS - 1
            least = max(0, top + 1 - BINS)
            share = size / max(1, int(self._counts.sum()))
            with np.errstate(over="ignore"):
                for place, of_bins in ((1, counts), (1 + BINS, energies)):
                    row[place : place + top + 1 - least] = share * of_bins[least : top + 1]
                    row[place] += share * of_bins[:least].sum()
            row[0] = least
        return out.reshape(-1)

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        """See `Survey.energies`; good to some percent where a stride has left elements out."""
        total: NDArray[np.float64] = measured.reshape(len(sizes), -1)[:, 1 + BINS :].sum(axis=1, dtype=np.float64)
        return total


class Spectra:
    """Spectra of a bucket's layers, summed over ranks.

    Parameters
    ----------
    sizes : sequence of int
        Elements of the layers.
    told : array of float32, shape (ranks, width)
        What `SpectrumSurvey` measured on every rank.
    """

    def __init__(self, sizes: Sequence[int], told: NDArray[np.float32]) -> None:
        self.sizes = tuple(sizes)
        rows = told.reshape(len(told), len(sizes), 1 + 2 * BINS).astype(np.float64)
        places = rows[:, :, :1].astype(np.int64) + np.arange(BINS)
        layers = np.broadcast_to(np.arange(len(sizes))[:, None], places.shape)
        self._bins = np.zeros((2, len(sizes), _ALL))  # counts and energies, from zero upwards
        np.add.at(self._bins[0], (layers, places), rows[:, :, 1 : 1 + BINS] / len(told))
        np.add.at(self._bins[1], (layers, places), rows[:, :, 1 + BINS :])

    def mixed(self, other: "Spectra", share: float) -> "Spectra":
        """Give the spectra of a mixture: ``share`` of the other ones, the rest of these."""
        made = object.__new__(Spectra)
        made.sizes = self.sizes
        made._bins = (1 - share) * self._bins + share * other._bins
        return made

    @property
    def energies(self) -> NDArray[np.float64]:
        """Squared L2 norm of each layer, summed over ranks."""
        total: NDArray[np.float64] = self._bins[1].sum(axis=1)
        return total

    def lost(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give the energy that selections of each layer's largest elements leave out, shape (layers, ratios)."""
        return np.array([_lost(*layer, size * ratios) for layer, size in zip(self._layers(), self.sizes, strict=True)])

    def lost_together(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give the energy that selections of the whole bucket's largest elements leave out, shape (ratios,)."""
        return _lost(*self._bins.sum(axis=1), sum(self.sizes) * ratios)

    def _layers(self) -> NDArray[np.float64]:
        return self._bins.transpose(1, 0, 2)


def _lost(counts: NDArray[np.float64], energies: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
    """Give the energy beside the ``kept`` largest elements; inside a bin all are taken to be alike."""
    above = np.concatenate(([0.0], np.cumsum(counts[::-1])))
    of_them = np.concatenate(([0.0], np.cumsum(energies[::-1])))
    return np.maximum(of_them[-1] - np.interp(kept, above, of_them), 0.0)
