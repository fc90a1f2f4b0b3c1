"""DeMo's compressor: the largest coefficients of a cosine transform of each chunk."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, LazyMean, Result, Scheme, far_from_largest
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.chunktopk import ChunkTopK
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import current_device
from mpicomp.registry import register
from mpicomp.rounds import Group, Round
from mpicomp.setting_checks import check_least

_POWERS = 24  # of an angle up to pi / 2 in the series of its cosine: the next term is below its rounding


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

    Transforms add in a fixed order, without a library: the mean has the same bits on every processor.

    Examples
    --------
    >>> DCTTopK(ratio=32 / 4096).selection.count(2 * 4096)
    64
    """

    id: ClassVar[str] = "dcttopk"
    family: ClassVar[str] = "transform"
    message: ClassVar[str] = "coefficients"
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
    overwrites: ClassVar[bool] = True
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
        array, energy = accumulated.array(), accumulated.energy
        finite = accumulated.finite and (far_from_largest(energy, dtype) or _comes_back_finite(array, side))
        in_place = accumulated.may_be_overwritten
        buffer = accumulated.with_trailer() if in_place else workspace.array("coefficients", numel + TRAILER, dtype)
        coefficients = buffer[:numel]
        _transform(array, side, False, coefficients)
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
        _transform(coefficients, side, True, coefficients)
        if not in_place:
            with np.errstate(over="ignore", invalid="ignore"):
                np.subtract(array, coefficients, out=coefficients)
        mean = LazyMean(numel, dtype, partial(_write_mean, result.mean, side))
        nonfinite = result.nonfinite
        if not far_from_largest(result.energy * context.group.size, dtype):
            written = mean.in_workspace(workspace)
            nonfinite = nonfinite or not bool(np.isfinite(written).all())
        return Result(
            mean=mean,
            sent=coefficients,
            energy=result.energy,
            gain=result.gain,
            kept=result.kept,
            nonfinite=nonfinite,
            stale=result.stale,
            thinned=[(0, numel, round(result.kept))],
            leaves="residual" if in_place else "sum",
        )


def _write_mean(mean: NDArray[np.floating] | LazyMean, side: int, out: NDArray[np.floating]) -> None:
    """Write the mean of coefficients, transformed back."""
    if isinstance(mean, LazyMean):
        mean.write(out)
    else:
        out[:] = mean
    _transform(out, side, True, out)


def _squares(array: NDArray[Any], side: int) -> Iterator[tuple[NDArray[Any], int, int]]:
    """Yield an array's chunks with their sides, then the rectangle and the row at its end; none of them empty."""
    start = 0
    for rows, columns in ((side, side), (array.size % side**2 // side, side), (1, array.size % side)):
        if rows * columns:
            stop = start + (array.size - start) // (rows * columns) * rows * columns
            if stop > start:
                yield array[start:stop], rows, columns
            start = stop


def _transform(source: NDArray[np.floating], side: int, back: bool, out: NDArray[np.floating]) -> None:
    """Write the orthonormal cosine transform of each chunk, along both of its sides, or the inverse of that."""
    for (chunks, rows, columns), (found, *_) in zip(_squares(source, side), _squares(out, side), strict=True):
        tables = _cosines(rows, source.dtype, back), _cosines(columns, source.dtype, not back)
        left, right = map(current_device().to_device, tables)
        kernels.multiply_tiles(chunks, left, right, found)


@functools.lru_cache(maxsize=32)
def _cosines(length: int, dtype: np.dtype[Any], transposed: bool) -> NDArray[np.floating]:
    """Return the matrix of the orthonormal DCT-II, or its inverse."""
    matrix = np.array([[_cosine((2 * place + 1) * row, length) for place in range(length)] for row in range(length)])
    matrix *= np.sqrt(2 / length)
    matrix[0] = np.sqrt(1 / length)
    return np.ascontiguousarray(matrix.T if transposed else matrix, dtype)


def _cosine(part: int, whole: int) -> float:
    """Return the cosine of ``pi * part / (2 * whole)``, by operations that every processor rounds alike.

    >>> abs(_cosine(5, 3) - math.cos(math.pi * 5 / 6)) < 1e-15
    True
    """
    part %= 4 * whole
    part = min(part, 4 * whole - part)
    if part > whole:
        return -_cosine(2 * whole - part, whole)
    angle, total = math.pi * part / (2 * whole), 1.0
    for power in range(_POWERS, 0, -2):
        total = 1 - total * (angle * angle) / (power * (power - 1))
    return total


def _comes_back_finite(array: NDArray[np.floating], side: int) -> bool:
    """Return whether the transforms of every chunk are finite: no number exceeds the chunk's norm."""
    most = float(np.finfo(array.dtype).max) / 4
    host = current_device().to_host(array).astype(np.float64)
    squares = (np.square(chunks).reshape(-1, rows * columns) for chunks, rows, columns in _squares(host, side))
    return all(float(np.sqrt(of_chunks.sum(axis=1).max())) < most for of_chunks in squares)
