"""Surveys: statistics of accumulated gradients that ranks measure and exchange now and then."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.errors import MessageError
from mpicomp.gpu import HOST, Device, current_device
from mpicomp.kernels import cpu
from mpicomp.workspace import Workspace

BINS = 64  # bins of a layer's spectrum in a message: four for every power of two, from its largest magnitude down

_PER_BIN = 2  # of the kernel's bins, eight for every power of two
_ALL = cpu.BINS // _PER_BIN
_FINITE = 2040 // _PER_BIN  # bins from this one on hold infinity and NaN
WHOLE = 1 << 16  # elements; a shorter layer is surveyed without a stride


class Survey(Protocol):
    """Measures layers of a bucket on one rank; ranks exchange the results."""

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        """Measure a bucket with layers of these sizes; return a flat array of the same length on all ranks.

        ``accumulated`` is the gradient plus the residual of this rank, ``residual`` the latter; both are read-only.
        """
        ...


class SpectrumSurvey:
    """Counts and energies of magnitudes in logarithmic bins, layer by layer.

    With a stride of n, every n-th group of 256 elements of a large layer is surveyed, different ones at each step.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._workspaces: dict[Device, Workspace] = {}

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        out = np.zeros((len(sizes), 1 + 2 * BINS), np.float32)  # a layer's least bin, counts and energies
        for row, size, (counts, energies) in zip(out, sizes, self._bins(accumulated, sizes, step), strict=True):
            filled = np.flatnonzero(energies[:_FINITE])
            top = int(filled[-1]) if filled.size else BINS - 1
            least = max(0, top + 1 - BINS)
            share = size / max(1, int(counts.sum()))
            counts, energies = counts[:_FINITE], energies[:_FINITE]
            with np.errstate(over="ignore"):
                for first, bins in ((1, counts), (1 + BINS, energies)):
                    row[first : first + top + 1 - least] = share * bins[least : top + 1]
                    row[first] += share * bins[:least].sum()
            row[0] = least
        return out.reshape(-1)

    def _bins(
        self, accumulated: NDArray[np.floating], sizes: Sequence[int], step: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        device = current_device()
        workspace = self._workspaces.setdefault(device, Workspace(device))
        # On the host one layer's bins stay in the cache; those of a device are copied to the host at once.
        rows = 1 if device is HOST else len(sizes)
        counts = workspace.array("counts", rows * cpu.BINS, np.int64).reshape(rows, cpu.BINS)
        energies = workspace.array("energies", rows * cpu.BINS, np.float64).reshape(rows, cpu.BINS)
        start = 0
        for number, size in enumerate(sizes):
            layer = accumulated[start : start + size]
            start += size
            stride = self._stride if size >= WHOLE * self._stride else 1
            row = number % rows
            kernels.spectrum(layer[cpu.GROUP * (step % stride) :], counts[row], energies[row], stride)
            if row == rows - 1:
                both = [bins.reshape(rows, _ALL, _PER_BIN).sum(axis=2) for bins in (counts, energies)]
                yield from zip(*(device.to_host(bins) for bins in both), strict=True)

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        """Return the squared L2 norm of each layer on this rank; with a stride exact to some percent."""
        total: NDArray[np.float64] = measured.reshape(len(sizes), -1)[:, 1 + BINS :].sum(axis=1, dtype=np.float64)
        return total


class Spectra:
    """Spectra of a bucket's layers, summed over ranks: results of `SpectrumSurvey`, shape (ranks, width)."""

    def __init__(self, sizes: Sequence[int], surveys: NDArray[np.float32]) -> None:
        self.sizes = tuple(sizes)
        rows = surveys.reshape(len(surveys), len(sizes), 1 + 2 * BINS).astype(np.float64)
        first = rows[:, :, :1]
        is_valid = (first >= 0) & (first <= _FINITE - BINS) & (first == np.floor(first))
        if not is_valid.all():
            rank, found = int(np.argwhere(~is_valid)[0, 0]), first[~is_valid][0]
            raise MessageError(
                f"survey: from rank {rank}: bins must begin at one from 0 to {_FINITE - BINS}, got {found}"
            )
        bins = first.astype(np.int64) + np.arange(BINS)
        layers = np.broadcast_to(np.arange(len(sizes))[:, None], bins.shape)
        self._bins = np.zeros((2, len(sizes), _ALL))  # counts and energies, from zero upwards
        np.add.at(self._bins[0], (layers, bins), rows[:, :, 1 : 1 + BINS] / len(surveys))
        np.add.at(self._bins[1], (layers, bins), rows[:, :, 1 + BINS :])

    def mixed(self, other: "Spectra", share: float) -> "Spectra":
        """Return ``1 - share`` of these spectra plus ``share`` of others."""
        mixture = object.__new__(Spectra)
        mixture.sizes = self.sizes
        mixture._bins = (1 - share) * self._bins + share * other._bins
        return mixture

    @property
    def energies(self) -> NDArray[np.float64]:
        """Squared L2 norm of each layer, summed over ranks."""
        total: NDArray[np.float64] = self._bins[1].sum(axis=1)
        return total

    def lost(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the energy that selections of each layer's largest elements leave out, shape (layers, ratios).

        Ratios have shape (ratios,), for all layers, or (layers, ratios).
        """
        ratios = np.broadcast_to(ratios, (len(self.sizes), ratios.shape[-1]))
        parts = zip(self._bins.transpose(1, 0, 2), self.sizes, ratios, strict=True)
        return np.array([_lost(layer[0], layer[1], size * of_layer) for layer, size, of_layer in parts])

    def lost_together(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the energy that selections of the whole bucket's largest elements leave out, shape (ratios,)."""
        counts, energies = self._bins.sum(axis=1)
        return _lost(counts, energies, sum(self.sizes) * ratios)


def _lost(counts: NDArray[np.float64], energies: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
    counts_above = np.concatenate(([0.0], np.cumsum(counts[::-1])))
    energy_above = np.concatenate(([0.0], np.cumsum(energies[::-1])))
    lost: NDArray[np.float64] = np.maximum(energy_above[-1] - np.interp(kept, counts_above, energy_above), 0.0)
    return lost
