"""Errors and bytes of layers at several settings, a ratio, a rank or bits each, and surveys that measure errors."""

import glob
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.compressors.base_compressor import match_layer_setting, num_kept
from mpicomp.compressors.kinds import Quantiser, packers
from mpicomp.compressors.powersgd import Matrix, orthogonalize
from mpicomp.compressors.quantize import MAX_BITS
from mpicomp.compressors.wire import sparse_bytes
from mpicomp.gpu import Device, current_device, to_python
from mpicomp.policies.policy import Shape
from mpicomp.policies.ratio_levels import ladder
from mpicomp.policies.surveys import WHOLE, Spectra, SpectrumSurvey, Survey
from mpicomp.workspace import Workspace

_STRIDE = 8  # a survey of selections or bits reads one group of elements in eight
_STRETCH = 256  # elements that are packed at a time if a grid is one of a whole array
_EXTRA_DIRECTIONS = 4  # that make the requested ones more exact
_ITERATIONS = 3  # of a subspace iteration

Column = NDArray[Any]  # settings of one layer, ascending: ratios, ranks or bits
Array = NDArray[np.float64]


class Table(ABC):
    """Layers of one bucket that can have different settings; errors are L2 norms of the elements that are not sent.

    ``base`` is a compressor with one setting for all layers, or one for each.
    """

    survey: Survey | None  # of the bucket; None if no layer can have one
    _measured: list[Column]  # settings, by layer; of ratios the elements that they keep

    def __init__(self, shape: Shape) -> None:
        self.base: Compressor | None = None
        """The compressor whose error is the limit, in this step; None for dense."""
        self.plan: tuple[Compressor, Compressor, str] | None = None
        """A base, the compressor that it becomes, and the reason."""
        self._shape = shape
        self._taken: list[list[Array]] = []
        self._lost: list[Array] | None = None  # mean of these, by layer

    @property
    def known(self) -> bool:
        """Whether there are surveys to compute errors from."""
        return self._lost is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        """Add the surveys of all ranks; they count after `update_errors`."""
        # The energy that each layer loses at each measured setting
        ends = np.cumsum([settings.size for settings in self._measured])[:-1]
        lost = np.split(surveys.astype(np.float64).sum(axis=0), ends)
        if all(np.isfinite(errors).all() for errors in lost):
            self._taken.append(lost)

    def update_errors(self) -> None:
        """Compute errors from the surveys that were added since the last call, if any."""
        if self._taken:
            self._lost, self._taken = [np.mean(errors, axis=0) for errors in zip(*self._taken, strict=True)], []

    def compressor(self, base: Any, chosen: Mapping[str, Any]) -> Compressor:
        """Return a compressor for this bucket with these settings, and those of ``base`` for the rest."""
        config = base.get_config()
        layers = {glob.escape(name): value for name, value in chosen.items()} | (config["layers"] or {})
        made = get_compressor(config | {"layers": layers or None})
        return made.bind(self._shape.names, self._shape.sizes, self._shape.shapes)

    def settings(self, base: Any) -> list[Column]:
        """Return the settings that each layer may have; one that was not measured is kept."""
        pairs = zip(self.settings_of(base).values(), self._measured, strict=True)
        return [measured if setting in measured else np.array([setting]) for setting, measured in pairs]

    def errors(self, settings: Sequence[Column]) -> list[Array]:
        """Return the error of each layer at these settings."""
        assert self._lost is not None
        return [
            np.sqrt(lost) if np.array_equal(column, measured) else np.zeros(column.size)
            for column, measured, lost in zip(settings, self._measured, self._lost, strict=True)
        ]

    @abstractmethod
    def settings_of(self, base: Any) -> dict[str, Any]:
        """Return the settings that a compressor has for the layers, by name."""

    @abstractmethod
    def sizes(self, settings: Sequence[Column], base: Any) -> list[Array]:
        """Return the bytes of each layer at these settings, as ``base`` sends it."""

    @abstractmethod
    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        """Return the bytes of a whole message with one setting for each layer."""


def table_for(compressor: Any, shape: Shape, span: float, whole: bool = False) -> Table:
    """Return the table of a bucket, with candidates from the uniform setting over ``span`` to that times ``span``.

    A compressor whose ``layer_setting`` is ``"ratio"`` has `ratio`, `layers` and `wire_for`, as `mpicomp.TopK` has; one
    of ``"rank"``, `rank`, `rank_of`, `wire`, `min_compression_rate` and, within a bucket, `matrices`, as
    `mpicomp.PowerSGD` has; one of ``"bits"``, `bits`, `bits_of`, `at_bits` and `bucket`, as `mpicomp.QSGD` has. With
    ``whole`` surveys of selections and bits read all elements, and errors of selections are exact.
    """
    if compressor.layer_setting == "rank":
        return _Matrices(compressor, shape, span)
    if compressor.layer_setting == "bits":
        return _Quantized(compressor, shape, span, 1 if whole else _STRIDE)
    return (_WholeSelections if whole else _Selections)(compressor, shape, span)


class _WholeSelections(Table):
    """Ratios, with errors from all elements at the candidates; at other ratios they are interpolated."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        super().__init__(shape)
        self._ratios = np.array(ladder(compressor.ratio / span, min(1.0, compressor.ratio * span)))
        ratios = sorted({*self._ratios.tolist(), compressor.ratio})
        self._measured = [np.unique([num_kept(ratio, size) for ratio in ratios]) for size in shape.sizes]
        self.survey: Survey | None = TailSurvey(self._measured)

    def settings_of(self, base: Any) -> dict[str, Any]:
        return {name: match_layer_setting(base.layers, name, base.ratio) for name in self._shape.names}

    def settings(self, base: Any) -> list[Column]:
        return [np.sort(np.append(self._ratios, ratio)) for ratio in self.settings_of(base).values()]

    def errors(self, settings: Sequence[Column]) -> list[Array]:
        assert self._lost is not None
        parts = zip(self._counts(settings), self._measured, self._lost, strict=True)
        return [np.sqrt(np.interp(counts, known, lost)) for counts, known, lost in parts]

    def sizes(self, settings: Sequence[Column], base: Any) -> list[Array]:
        # Bytes per element change little with the count, so those of now are used
        counts = self._counts(settings)
        ratios = self.settings_of(base).values()
        places = [np.searchsorted(column, ratio) for column, ratio in zip(settings, ratios, strict=True)]
        count = int(counts[np.arange(len(places)), places].sum())
        return list(counts * (self._message(count, base) / count))

    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        count = sum(num_kept(ratio, size) for ratio, size in zip(chosen, self._shape.sizes, strict=True))
        return self._message(count, base)

    def _counts(self, settings: Sequence[Column]) -> NDArray[np.int64]:
        """Return the elements that layers keep, shape (layers, settings)."""
        pairs = zip(settings, self._shape.sizes, strict=True)
        return np.array([[num_kept(ratio, size) for ratio in column] for column, size in pairs])

    def _message(self, count: int, base: Any) -> float:
        shape = self._shape
        return sparse_bytes(count, shape.numel, shape.dtype, base.wire_for(count, shape.numel))


class _Selections(_WholeSelections):
    """Ratios, with errors from spectra of a sample of the elements."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        super().__init__(compressor, shape, span)
        self.survey = SpectrumSurvey(_STRIDE)
        self._mean: Spectra | None = None
        self._count = 0
        self._spectra: Spectra | None = None

    @property
    def known(self) -> bool:
        return self._spectra is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        spectra = Spectra(self._shape.sizes, surveys)
        self._count += 1
        self._mean = spectra if self._mean is None else self._mean.mixed(spectra, 1 / self._count)

    def update_errors(self) -> None:
        if self._mean is not None:
            self._spectra, self._mean, self._count = self._mean, None, 0

    def errors(self, settings: Sequence[Column]) -> list[Array]:
        assert self._spectra is not None
        ratios = self._counts(settings) / np.array(self._shape.sizes)[:, None]
        return list(np.sqrt(self._spectra.lost(ratios)))


class _Matrices(Table):
    """Ranks of the matrices that are compressed at the uniform rank."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        super().__init__(shape)
        found = {matrix.start: matrix for matrix in compressor.bind(shape.names, shape.sizes, shape.shapes).matrices}
        starts = np.cumsum([0, *shape.sizes])[:-1].tolist()
        self._matrices = {name: found[start] for name, start in zip(shape.names, starts, strict=True) if start in found}
        ranges: list[tuple[int, int]] = []
        for matrix in self._matrices.values():
            # From this rank on factors are not smaller than the matrix by the compressor's factor, and it is dense
            dense_rank = matrix.rows * matrix.columns / (matrix.rows + matrix.columns) / compressor.min_compression_rate
            most = min(math.ceil(compressor.rank * span), matrix.rows, matrix.columns, math.ceil(dense_rank) - 1)
            least = min(max(1, math.floor(compressor.rank / span)), most)
            ranges.append((least, max(least, most)))
        self._measured = [np.arange(least, most + 1) for least, most in ranges]
        self.survey = RankSurvey(list(self._matrices.values()), ranges) if ranges else None
        self._lost = None if ranges else []

    def settings_of(self, base: Any) -> dict[str, Any]:
        return {name: min(base.rank_of(name), matrix.rows, matrix.columns) for name, matrix in self._matrices.items()}

    def sizes(self, settings: Sequence[Column], base: Any) -> list[Array]:
        itemsize = self._shape.dtype.itemsize if base.wire is None else 2
        return [
            (matrix.rows + matrix.columns) * itemsize * column.astype(float)
            for column, matrix in zip(settings, self._matrices.values(), strict=True)
        ]

    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        return float(sum(size[0] for size in self.sizes([np.array([rank]) for rank in chosen], base)))


class _Quantized(Table):
    """Bits of every layer, whatever its size."""

    def __init__(self, compressor: Any, shape: Shape, span: float, stride: int) -> None:
        super().__init__(shape)
        least = max(compressor.least_bits, math.floor(compressor.bits / span))
        numbers = range(least, min(MAX_BITS, math.ceil(compressor.bits * span)) + 1)
        # If residuals shrink at the uniform bits, they have to at all others
        quantisers = [compressor.at_bits(bits) for bits in numbers]
        quantisers = [each for each in quantisers if each.contractive or not compressor.contractive]
        self._measured = [np.array([each.bits for each in quantisers])] * len(shape.names)
        self.survey = BitsSurvey(quantisers, compressor.bucket or _STRETCH, stride)

    def settings_of(self, base: Any) -> dict[str, Any]:
        return {name: base.bits_of(name) for name in self._shape.names}

    def sizes(self, settings: Sequence[Column], base: Any) -> list[Array]:
        return [
            np.array([float(base.at_bits(int(bits)).packed_bytes(size)) for bits in column])
            for column, size in zip(settings, self._shape.sizes, strict=True)
        ]

    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        made: Any = self.compressor(base, dict(zip(self._shape.names, chosen, strict=True)))
        [packer] = packers(made, [self._shape.numel])
        return float(packer.packed_bytes)


class TailSurvey:
    """Energies that selections of each layer's largest elements leave out, from all elements."""

    def __init__(self, counts: Sequence[NDArray[np.int64]]) -> None:
        self._counts = tuple(counts)  # of elements that each layer keeps, ascending

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        flat = current_device().to_host(accumulated).astype(np.float64)
        parts = []
        for layer, counts in zip(np.split(flat, np.cumsum(sizes)[:-1]), self._counts, strict=True):
            below = np.concatenate(([0.0], np.cumsum(np.sort(np.square(layer)))))  # of the smallest ones
            parts.append(below[layer.size - counts])
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float32)


class RankSurvey:
    """Energies that approximations of a bucket's matrices leave out at several ranks.

    The leading directions come from a subspace iteration that starts at random, the same on all ranks. It leaves out at
    least as much as the best approximation, and at high ranks of slowly falling singular values some percent more.
    """

    def __init__(self, matrices: Sequence[Matrix], ranks: Sequence[tuple[int, int]]) -> None:
        self._matrices = tuple(matrices)
        self._ranks = tuple(ranks)  # the lowest and the highest rank of each matrix; all between are measured

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        parts = []
        for matrix, (least, most) in zip(self._matrices, self._ranks, strict=True):
            values = accumulated[matrix.start : matrix.stop].reshape(matrix.rows, matrix.columns)
            parts.append(_lost_at_ranks(values, most)[least - 1 :])
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float32)


class BitsSurvey:
    """Energies that quantizers leave out of each layer, shape (layers, quantizers)."""

    def __init__(self, quantisers: Sequence[Quantiser], bucket: int, stride: int = 1) -> None:
        self._quantisers = tuple(quantisers)  # one for each number of bits
        self._bucket = bucket  # their length of a bucket
        self._stride = stride  # every n-th bucket of a large layer is measured, other ones at every step
        self._workspaces: dict[Device, Workspace] = {}

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        out = np.zeros((len(sizes), len(self._quantisers)))
        workspace = self._workspaces.setdefault(current_device(), Workspace(current_device()))
        for row, start, size in zip(out, np.cumsum([0, *sizes]), sizes, strict=False):
            sample = self._sample(accumulated[start : start + size], workspace, step)
            sent = workspace.array("sent", sample.size, sample.dtype)
            for place, quantiser in enumerate(self._quantisers):
                message = workspace.array("message", quantiser.packed_bytes(sample.size), np.dtype(np.uint8))
                row[place] = quantiser.pack(sample, message, sent, step)
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


def _lost_at_ranks(matrix: NDArray[np.floating], most: int) -> Array:
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
    left: Array = np.maximum(energy - np.cumsum(squares[:most]), 0.0)
    return left
