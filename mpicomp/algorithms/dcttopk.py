"""DeMo's compressor: the largest coefficients of a cosine transform of each chunk."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, Result, Scheme, far_from_largest, is_finite
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.chunktopk import ChunkTopK
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import current_device, to_python
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.setting_checks import check_least
from mpicomp.workspace import Workspace


@register
@dataclass(frozen=True, repr=False)
class DCTTopK(Compressor):
    """DeMo (arXiv 2411.19870): chunks go through a cosine transform, and its largest coefficients are sent.

    ::

        c = scipy.fft.dctn(x.reshape(-1, side, side), axes=(1, 2), norm="ortho").reshape(-1, side**2)
        c[abs(c) < np.sort(abs(c))[:, [-k]]] = 0
        sent = scipy.fft.idctn(c.reshape(-1, side, side), axes=(1, 2), norm="ortho").ravel()

    Few coefficients describe elements of a chunk that move in common. The transform is orthonormal: energy, error
    feedback and means are the same in it.

    Parameters
    ----------
    ratio : float
        Kept fraction of coefficients, in (0, 1]; k of a chunk is the nearest integer to ``ratio * side**2``, at
        least 1.
    side : int
        A chunk of ``side**2`` neighbours is transformed as a square; the end of a bucket as a rectangle, and a row.
    wire, indices
        Formats of coefficients; see `mpicomp.Sparsifier`.

    Notes
    -----
    DeMo is this with a residual that decays and a step along the sign of the mean:
    ``DistributedOptimizer(torch.optim.Adam(parameters, lr, betas=(0, 0)), ..., compressor="dcttopk",
    feedback_decay=0.999)``, see docs/updates.md.

    Different from published code: chunks are of the flat bucket, and not of tiles of each matrix; the learning rate is
    not in the memory, which is the same for a constant rate, as signs have no scale; messages of all ranks are added in
    rank order, so that all have the same bits.

    Chunks of 16**2 trained a transformer better than the published ones of 64**2, and take a third of their seconds;
    see docs/updates.md. Tiles of matrices trained it no better than chunks of the same size; see docs/compressors.md.

    Every rank transforms back with NumPy's library: the mean is the same bits on every rank if they all have the same
    library on the same kind of processor.

    Examples
    --------
    >>> DCTTopK(ratio=32 / 4096).selection.count(2 * 4096)
    64
    """

    id: ClassVar[str] = "dcttopk"
    family: ClassVar[str] = "transform"
    message: ClassVar[str] = "coefficients"
    needs_identical_blas: ClassVar[bool] = True
    paper: ClassVar[str] = "DeMo, Peng et al. 2024, arXiv 2411.19870; chunks of flat buckets, sums in rank order"

    ratio: float = 32 / 4096
    side: int = 64
    wire: str | None = field(default=None, kw_only=True)
    indices: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        check_least(self.id, "side", self.side, 1)
        self._set(ratio=self.selection.ratio)

    @property
    def selection(self) -> ChunkTopK:
        """The selection among coefficients."""
        return _Coefficients(self.ratio, self.side**2, wire=self.wire, indices=self.indices)

    feedback = True  # the residual keeps coefficients that are not sent
    can_fall_back_to_dense = False  # the residual is DeMo's momentum, which a dense step would empty

    def expected(self, numel: int) -> int:
        return self.selection.count(numel)

    def wire_bytes_per_element(self, itemsize: int) -> float:
        return self.selection.wire_bytes_per_element(itemsize)


class _Coefficients(ChunkTopK):
    """The same selection, whose errors name the compressor that it is a part of."""

    id = "dcttopk"


@register
class Transformed(Scheme[DCTTopK]):
    """Coefficients of a cosine transform, exchanged by a sparse collective, whose mean is transformed back."""

    id: ClassVar[str] = "transformed"
    paper: ClassVar[str] = "the exchange of DeMo, Peng et al. 2024, arXiv 2411.19870, by any sparse collective"
    messages: ClassVar[str] = "coefficients"
    needs_whole_message: ClassVar[bool] = True

    def __init__(self, compressor: DCTTopK, inner: Scheme[ChunkTopK]) -> None:
        super().__init__(compressor)
        self._inner = inner
        self.may_drop_selected, self.by_value = inner.may_drop_selected, inner.by_value

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        assert isinstance(compressor, DCTTopK)
        return compressor.selection

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        return self._inner.rounds(numel, dtype, group, step)

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        numel, dtype, workspace, side = accumulated.numel, accumulated.dtype, context.workspace, self.compressor.side
        array = accumulated.array()
        buffer = workspace.array("coefficients", numel + TRAILER, dtype)
        coefficients = buffer[:numel]
        with np.errstate(over="ignore", invalid="ignore"):
            _transform(array, side, False, coefficients, workspace)
        [energy] = to_python(kernels.energy(coefficients))
        finite = accumulated.finite and (far_from_largest(energy, dtype) or _comes_back_finite(array, side))
        part = GradientWithResidual.ready(buffer, energy, 0.0, finite, accumulated.stale)
        result: Result = yield from self._inner.exchange(part, context)
        if result.problem is not None:
            return result
        # The coefficients left are transformed back, and not those sent: some collectives move coefficients within a
        # host, and the residual keeps what is left on this rank.
        if isinstance(result.sent, Selection):
            kernels.subtract_at(result.sent.indices, result.sent.values, coefficients)
        else:
            np.subtract(coefficients, result.sent, out=coefficients)
        mean, sent = coefficients, workspace.array("transformed sent", numel, dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            _transform(coefficients, side, True, sent, workspace)
            np.subtract(array, sent, out=sent)
            _transform(result.mean_in(workspace), side, True, mean, workspace)
        return Result(
            mean=mean,
            sent=sent,
            energy=result.energy,
            gain=result.gain,
            kept=result.kept,
            nonfinite=result.nonfinite or not is_finite(mean, result.energy, context.group.size),
            stale=result.stale,
            thinned=[(0, numel, round(result.kept))],
        )


def _squares(array: NDArray[Any], side: int) -> Iterator[NDArray[Any]]:
    """Yield an array's chunks, shape (chunks, side, side), then the rectangle and the row at its end."""
    start = 0
    for rows, columns in ((side, side), (array.size % side**2 // side, side), (1, array.size % side)):
        if rows * columns:
            count = (array.size - start) // (rows * columns)
            stop = start + count * rows * columns
            if count:
                yield array[start:stop].reshape(count, rows, columns)
            start = stop


def _transform(
    source: NDArray[np.floating], side: int, back: bool, out: NDArray[np.floating], workspace: Workspace
) -> None:
    """Write the orthonormal cosine transform of each chunk, along both of its sides, or the inverse of that."""
    scratch = workspace.array("transformed rows", source.size, source.dtype)
    for chunks, rows, found in zip(*(_squares(array, side) for array in (source, scratch, out)), strict=True):
        height, width = chunks.shape[1:]
        left, right = (current_device().to_device(_cosines(length, chunks.dtype, back)) for length in (height, width))
        np.matmul(chunks.reshape(-1, width), right.T, out=rows.reshape(-1, width))
        np.matmul(left, rows, out=found)


@functools.lru_cache(maxsize=32)
def _cosines(length: int, dtype: np.dtype[Any], back: bool) -> NDArray[np.floating]:
    """Return the matrix of the orthonormal DCT-II, or its inverse."""
    frequencies, places = np.arange(length)[:, None], np.arange(length)
    matrix = np.sqrt(2 / length) * np.cos(np.pi * (places + 0.5) * frequencies / length)
    matrix[0] = np.sqrt(1 / length)
    return np.ascontiguousarray(matrix.T if back else matrix, dtype)


def _comes_back_finite(array: NDArray[np.floating], side: int) -> bool:
    """Return whether the transforms of every chunk are finite: no number exceeds the chunk's norm."""
    most = float(np.finfo(array.dtype).max) / 4
    host = current_device().to_host(array).astype(np.float64)
    return all(float(np.sqrt(np.square(chunks).sum(axis=(1, 2)).max())) < most for chunks in _squares(host, side))
