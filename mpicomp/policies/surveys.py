"""Surveys: statistics of accumulated gradients that ranks measure and exchange now and then, equal on all ranks."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.device import HOST, Device, current_device
from mpicomp.errors import MessageError
from mpicomp.kernels import cpu
from mpicomp.workspace import Workspace

BINS = 64
"""Bins that a layer's spectrum travels in: four for every power of two, from its largest magnitude down."""

_PER_BIN = 2  # of the kernel's bins, eight for every power of two
_ALL = cpu.BINS // _PER_BIN
_FINITE = 2040 // _PER_BIN  # bins from here on hold infinity and NaN
WHOLE = 1 << 16  # elements; a shorter layer is looked at as a whole


class Survey(Protocol):
    """Measures layers of a bucket on one rank. Ranks send each other what it gives, whose length is the same on all."""

    def width(self, sizes: Sequence[int]) -> int:
        """Return the length of the survey of a bucket with layers of these sizes."""
        ...

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        """Measure a bucket, shape (width,).

        Parameters
        ----------
        accumulated : array, shape (sum of sizes,)
            Gradient plus residual of this rank; not to be written to.
        residual : array, shape (sum of sizes,), or None
            What is in it of earlier steps, if there is feedback; not to be written to.
        sizes : sequence of int
            Elements of its layers.
        step : int
            Number of the step.
        """
        ...

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64] | None:
        """Return the squared L2 norm of each layer on this rank, from what was measured; shape (layers,), or None."""
        ...


class SpectrumSurvey:
    """Counts and energies of magnitudes in logarithmic bins, layer by layer.

    Parameters
    ----------
    stride : int
        1 looks at all elements of a layer; n at every n-th group of 256 of them, other ones at every step.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._workspaces: dict[Device, Workspace] = {}

    def width(self, sizes: Sequence[int]) -> int:
        """See `Survey.width`: a layer takes its top bin, counts and energies."""
        return len(sizes) * (1 + 2 * BINS)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        """See `Survey.measure`."""
        out = np.zeros((len(sizes), 1 + 2 * BINS), np.float32)
        for row, size, (counts, energies) in zip(out, sizes, self._bins(accumulated, sizes, step), strict=True):
            filled = np.flatnonzero(energies[:_FINITE])
            top = int(filled[-1]) if filled.size else BINS - 1
            least = max(0, top + 1 - BINS)
            share = size / max(1, int(counts.sum()))
            counts, energies = counts[:_FINITE], energies[:_FINITE]
            with np.errstate(over="ignore"):
                for place, of_bins in ((1, counts), (1 + BINS, energies)):
                    row[place : place + top + 1 - least] = share * of_bins[least : top + 1]
                    row[place] += share * of_bins[:least].sum()
            row[0] = least
        return out.reshape(-1)

    def _bins(
        self, accumulated: NDArray[np.floating], sizes: Sequence[int], step: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Yield counts and energies of each layer's magnitudes in host memory, shape (_ALL,)."""
        device = current_device()
        workspace = self._workspaces.setdefault(device, Workspace(device))
        # On the host one layer's bins stay in the cache; those of a device come to the host all at once.
        together = 1 if device is HOST else len(sizes)
        counts = workspace.array("counts", together * cpu.BINS, np.int64).reshape(together, cpu.BINS)
        energies = workspace.array("energies", together * cpu.BINS, np.float64).reshape(together, cpu.BINS)
        start = 0
        for number, size in enumerate(sizes):
            layer = accumulated[start : start + size]
            start += size
            stride = self._stride if size >= WHOLE * self._stride else 1
            row = number % together
            kernels.spectrum(layer[cpu.GROUP * (step % stride) :], counts[row], energies[row], stride)
            if row == together - 1:
                both = [own.reshape(together, _ALL, _PER_BIN).sum(axis=2) for own in (counts, energies)]
                yield from zip(*(device.to_host(own) for own in both), strict=True)

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
        Results of `SpectrumSurvey` on every rank.
    """

    def __init__(self, sizes: Sequence[int], told: NDArray[np.float32]) -> None:
        self.sizes = tuple(sizes)
        rows = told.reshape(len(told), len(sizes), 1 + 2 * BINS).astype(np.float64)
        first = rows[:, :, :1]
        right = (first >= 0) & (first <= _FINITE - BINS) & (first == np.floor(first))
        if not right.all():
            rank, found = int(np.argwhere(~right)[0, 0]), first[~right][0]
            raise MessageError(
                f"survey: from rank {rank}: bins must begin at one from 0 to {_FINITE - BINS}, got {found}"
            )
        places = first.astype(np.int64) + np.arange(BINS)
        layers = np.broadcast_to(np.arange(len(sizes))[:, None], places.shape)
        self._bins = np.zeros((2, len(sizes), _ALL))  # counts and energies, from zero upwards
        np.add.at(self._bins[0], (layers, places), rows[:, :, 1 : 1 + BINS] / len(told))
        np.add.at(self._bins[1], (layers, places), rows[:, :, 1 + BINS :])

    def mixed(self, other: "Spectra", share: float) -> "Spectra":
        """Return the spectra of a mixture: ``share`` of the other ones, the rest of these."""
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
        """Return the energy that selections of each layer's largest elements leave out, shape (layers, ratios).

        Ratios are the same for all layers, shape (ratios,), or each layer's own, shape (layers, ratios).
        """
        own = np.broadcast_to(ratios, (len(self.sizes), ratios.shape[-1]))
        parts = zip(self._layers(), self.sizes, own, strict=True)
        return np.array([_lost(layer[0], layer[1], size * asked) for layer, size, asked in parts])

    def lost_together(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the energy that selections of the whole bucket's largest elements leave out, shape (ratios,)."""
        counts, energies = self._bins.sum(axis=1)
        return _lost(counts, energies, sum(self.sizes) * ratios)

    def _layers(self) -> NDArray[np.float64]:
        return self._bins.transpose(1, 0, 2)


def _lost(counts: NDArray[np.float64], energies: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the energy beside the ``kept`` largest elements; inside a bin all are taken to be alike."""
    above = np.concatenate(([0.0], np.cumsum(counts[::-1])))
    of_them = np.concatenate(([0.0], np.cumsum(energies[::-1])))
    lost: NDArray[np.float64] = np.maximum(of_them[-1] - np.interp(kept, above, of_them), 0.0)
    return lost
