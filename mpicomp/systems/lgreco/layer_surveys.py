"""Surveys of a bucket's layers at every setting that L-GreCo may give them: ratios, ranks and bits."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.algorithms.matrix_batches import Matrix, orthogonalize
from mpicomp.compressors.kinds import Quantiser
from mpicomp.device import Device, current_device, to_python
from mpicomp.policies.surveys import WHOLE, Survey
from mpicomp.workspace import Workspace

_EXTRA_DIRECTIONS = 4  # that make the requested ones more exact
_ITERATIONS = 3  # of a subspace iteration


class SurveyPair:
    """Two surveys in one."""

    def __init__(self, first: Survey, second: Survey) -> None:
        self._first, self._second = first, second

    def width(self, sizes: Sequence[int]) -> int:
        return self._first.width(sizes) + self._second.width(sizes)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        surveys = (self._first, self._second)
        return np.concatenate([survey.measure(accumulated, residual, sizes, step) for survey in surveys])

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64] | None:
        cut = self._first.width(sizes)
        first = self._first.energies(measured[:cut], sizes)
        return self._second.energies(measured[cut:], sizes) if first is None else first


class TailSurvey:
    """Energies that selections of each layer's largest elements leave out, from all elements, and layers' energies."""

    def __init__(self, counts: Sequence[NDArray[np.int64]]) -> None:
        self._counts = tuple(counts)  # of elements that each layer keeps, ascending

    def width(self, sizes: Sequence[int]) -> int:
        # For each layer its energy, then the energy left out at each count
        return sum(1 + counts.size for counts in self._counts)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        flat = current_device().to_host(accumulated).astype(np.float64)
        parts = []
        for layer, counts in zip(np.split(flat, np.cumsum(sizes)[:-1]), self._counts, strict=True):
            below = np.concatenate(([0.0], np.cumsum(np.sort(np.square(layer)))))  # of the smallest ones
            parts.append(below[layer.size - np.concatenate(([0], counts))])
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float32)

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        starts = np.cumsum([0, *(1 + counts.size for counts in self._counts)])[:-1]
        energies: NDArray[np.float64] = measured[starts].astype(np.float64)
        return energies

    def lost(self, surveys: NDArray[np.float32]) -> list[NDArray[np.float64]]:
        """Return the energy that all ranks leave out of each layer at each count; surveys: (ranks, width)."""
        ends = np.cumsum([1 + part.size for part in self._counts])[:-1]
        return [part[1:] for part in np.split(surveys.astype(np.float64).sum(axis=0), ends)]


class SumSurvey:
    """A survey of the sum of several steps' accumulated gradients, in the last of these steps.

    Steps that are not finite on this rank are left out. A step that is undone because of another rank stays in it.
    """

    def __init__(self, inner: Survey) -> None:
        self._inner = inner
        self._sum: NDArray[np.floating] | None = None
        self._steps = 0  # in the sum
        self.last = False  # whether the step is the last one

    def begin(self) -> None:
        """Begin a new sum."""
        self._steps = 0

    def width(self, sizes: Sequence[int]) -> int:
        # 0 before the last step
        return self._inner.width(sizes) if self.last else 0

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        if all(to_python(np.isfinite(accumulated).all())):
            if self._sum is None:
                self._sum = accumulated.copy()
            elif self._steps:
                self._sum += accumulated
            else:
                self._sum[:] = accumulated
            self._steps += 1
        if not self.last:
            return np.empty(0, np.float32)
        whole = accumulated if self._sum is None or not self._steps else self._sum
        return self._inner.measure(whole, None, sizes, step)

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> None:
        return


class RankSurvey:
    """Energies that approximations of a bucket's matrices leave out at several ranks, and energies of all layers.

    The leading directions come from a subspace iteration that starts at random, the same on all ranks. It leaves out at
    least as much as the best approximation, and at high ranks of slowly falling singular values some percent more.
    """

    def __init__(self, matrices: Sequence[Matrix], ranks: Sequence[tuple[int, int]]) -> None:
        self._matrices = tuple(matrices)
        self._ranks = tuple(ranks)  # the lowest and the highest rank of each matrix; all between are measured

    def width(self, sizes: Sequence[int]) -> int:
        # Energies of the layers, then each matrix's by rank
        return len(sizes) + sum(most - least + 1 for least, most in self._ranks)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        # NaN for matrices that hold it or infinity
        bounds = np.cumsum([0, *sizes])
        layers = [accumulated[start:stop] for start, stop in itertools.pairwise(bounds)]
        parts = [np.array(to_python(*(kernels.energy(layer) for layer in layers)))]
        for matrix, (least, most) in zip(self._matrices, self._ranks, strict=True):
            values = accumulated[matrix.start : matrix.stop].reshape(matrix.rows, matrix.columns)
            parts.append(_lost_at_ranks(values, most)[least - 1 :])
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float32)

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        return measured[: len(sizes)].astype(np.float64)

    def lost(self, surveys: NDArray[np.float32], sizes: Sequence[int]) -> list[NDArray[np.float64]]:
        """Return the energy that each matrix loses at each rank of its factors; surveys: (ranks, width)."""
        cuts = np.cumsum([len(sizes), *(most - least + 1 for least, most in self._ranks)])
        return np.split(surveys.astype(np.float64).sum(axis=0), cuts)[1:-1]


class BitsSurvey:
    """Energies that a quantizer leaves out of each layer at several bits, and energies of the layers."""

    def __init__(self, quantisers: Sequence[Quantiser], bucket: int, stride: int = 1) -> None:
        self._quantisers = tuple(quantisers)  # one for each number of bits
        self._bucket = bucket  # their length of a bucket
        self._stride = stride  # every n-th bucket of a large layer is measured, other ones at every step
        self._workspaces: dict[Device, Workspace] = {}

    def width(self, sizes: Sequence[int]) -> int:
        # For each layer its energy, then the energy left out at each number of bits
        return len(sizes) * (1 + len(self._quantisers))

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        # NaN or infinity for layers that hold it
        out = np.zeros((len(sizes), 1 + len(self._quantisers)))
        workspace = self._workspaces.setdefault(current_device(), Workspace(current_device()))
        for row, start, size in zip(out, np.cumsum([0, *sizes]), sizes, strict=False):
            sample = self._sample(accumulated[start : start + size], workspace, step)
            sent = workspace.array("sent", sample.size, sample.dtype)
            [energy] = to_python(kernels.energy(sample))
            lost = []
            for quantiser in self._quantisers:
                message = workspace.array("message", quantiser.packed_bytes(sample.size), np.dtype(np.uint8))
                lost.append(quantiser.pack(sample, message, sent, step))
            row[:] = [energy, *lost]
            row *= size / max(1, sample.size)
        with np.errstate(over="ignore"):
            return out.reshape(-1).astype(np.float32)

    def _sample(self, layer: NDArray[np.floating], workspace: Workspace, step: int) -> NDArray[np.floating]:
        if layer.size < WHOLE * self._stride:
            return layer
        buckets = layer.size // (self._bucket * self._stride)
        rows = layer[: buckets * self._bucket * self._stride].reshape(buckets, self._stride, self._bucket)
        sample = workspace.array("sample", buckets * self._bucket, layer.dtype)
        sample.reshape(buckets, self._bucket)[:] = rows[:, step % self._stride]
        return sample

    def energies(self, measured: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        # Exact to some percent with a stride
        return measured.reshape(len(sizes), -1)[:, 0].astype(np.float64)

    def lost(self, surveys: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        """Return the energy that all ranks lose, shape (layers, quantizers); surveys: (ranks, width)."""
        lost: NDArray[np.float64] = surveys.astype(np.float64).sum(axis=0).reshape(len(sizes), -1)[:, 1:]
        return lost


def _lost_at_ranks(matrix: NDArray[np.floating], most: int) -> NDArray[np.float64]:
    """Return the energy outside the leading directions of a matrix, from 1 to ``most`` of them."""
    device = current_device()
    [energy] = to_python(kernels.energy(matrix.reshape(-1)))
    if not np.isfinite(energy):
        return np.full(most, np.nan)
    directions = min(*matrix.shape, most + _EXTRA_DIRECTIONS)
    right = device.to_device(
        np.random.default_rng(0).standard_normal((matrix.shape[1], directions)).astype(matrix.dtype)
    )
    for _ in range(_ITERATIONS):
        with np.errstate(over="ignore", invalid="ignore"):
            right = matrix.T @ orthogonalize(matrix @ orthogonalize(right))
        if not all(to_python(np.isfinite(right).all())):  # products of the largest numbers overflow
            return np.full(most, np.nan)
    squares = np.linalg.svd(device.to_host(right).astype(np.float64), compute_uv=False) ** 2
    left: NDArray[np.float64] = np.maximum(energy - np.cumsum(squares[:most]), 0.0)
    return left
