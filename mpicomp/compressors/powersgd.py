"""PowerSGD: a matrix travels as the product of two thin ones; matrices of one shape lie in stacks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.base_compressor import BucketParameters, Compressor, bound, match_layer_setting
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_layers, check_least, check_range


@dataclass(frozen=True)
class Matrix:
    """A parameter that travels as two factors: its start in its bucket, its sides, and the factors' rank."""

    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        """End of the matrix in its bucket."""
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape and rank at equal distances: the first, their number, and the distance of their starts.

    Examples
    --------
    >>> import numpy as np
    >>> Stack(Matrix(1, 1, 2, 1), count=3, distance=3).of(np.arange(9)).tolist()
    [[[1, 2]], [[4, 5]], [[7, 8]]]
    """

    first: Matrix
    count: int = 1
    distance: int = 0

    @property
    def starts(self) -> range:
        """Starts of the matrices in their bucket."""
        return range(self.first.start, self.first.start + max(1, self.count * self.distance), self.distance or 1)

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a view of the matrices in a flat array with room for all distances, shape (count, rows, columns)."""
        start, stop, count = self.first.start, self.first.stop, self.count
        if count == 1:
            part = array[start:stop]
        elif start + count * self.distance <= array.size:
            part = array[start : start + count * self.distance].reshape(count, -1)[:, : stop - start]
        else:
            before = stop - self.distance
            part = array[before : before + count * self.distance].reshape(count, -1)[:, start - stop :]
        return part.reshape(count, self.first.rows, self.first.columns)

    def within(self, numel: int) -> "tuple[Stack, ...]":
        """Return the stack, with its last matrix in a second one if an array has no room for all distances."""
        first, others = self.first, self.count - 1
        if not others or first.start + self.count * self.distance <= numel or first.stop >= self.distance:
            return (self,)
        return replace(self, count=others), Stack(replace(first, start=self.starts[-1]))


def stacked(matrices: Sequence[Matrix], numel: int | None = None) -> tuple[Stack, ...]:
    """Return ascending matrices in stacks, which fit into arrays of ``numel`` if that is known.

    >>> [stack.count for stack in stacked([Matrix(start, 2, 3, 1) for start in (0, 10, 20, 26, 32)])]
    [3, 2]
    >>> [stack.count for stack in stacked([Matrix(start, 2, 3, 1) for start in (0, 10)], 16)]
    [1, 1]
    """
    stacks: list[Stack] = []
    last: dict[tuple[int, int, int], int] = {}
    for matrix in matrices:
        shape = (matrix.rows, matrix.columns, matrix.rank)
        place = last.get(shape)
        if place is not None:
            stack = stacks[place]
            distance = matrix.start - stack.starts[-1]
            if stack.count == 1 or distance == stack.distance:
                stacks[place] = replace(stack, count=stack.count + 1, distance=distance)
                continue
        last[shape] = len(stacks)
        stacks.append(Stack(matrix))
    return tuple(stacks) if numel is None else tuple(part for stack in stacks for part in stack.within(numel))


def multiply(left: NDArray[np.floating], right: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    """Write products of stacks of matrices, without warnings: flags report numbers that are not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if left.shape[-1] == 1:  # several times as fast as matmul, which runs a plain loop over such products
            np.multiply(left, right, out=out)
        else:
            np.matmul(left, right, out=out)


def orthogonalize(matrix: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return an orthonormal basis that contains the span of the columns, of the shape (..., rows, rank) and dtype."""
    basis, _ = np.linalg.qr(matrix.astype(np.float64))
    return basis.astype(matrix.dtype)


@register
@dataclass(frozen=True, repr=False)
class PowerSGD(Compressor):
    """PowerSGD (arXiv 1905.13727): each matrix is sent as the product of two thin ones, which follow it over steps.

    ::

        P = mean_over_ranks(M @ Q)  # Q: of the step before, or random
        P, _ = np.linalg.qr(P)
        Q = mean_over_ranks(M.T @ P); mean = P @ Q.T

    A parameter is the matrix of its first dimension against all others. In one dimension, and where that saves too
    little, it travels dense.

    Parameters
    ----------
    rank : int
        Columns of the factors, at most the matrix's smaller side.
    min_compression_rate : float
        A matrix is compressed if ``(rows + columns) * rank * min_compression_rate < rows * columns``.
    layers : mapping of str to int, optional
        Ranks of parameters by patterns of names, see `TopK`.
    rows : int, optional
        A matrix with more rows is cut into several of at most this many, each of this rank.
    wire : {None, "fp16", "bf16"}
        Format of factors; the 16-bit forms are summed in at least float32.

    Notes
    -----
    Names and defaults are those of PyTorch's hook, but for ``rows`` and ``rank`` (the paper's word;
    there ``matrix_approximation_rank``, 1); ``warmup`` takes the place of its ``start_powerSGD_iter``.
    Different from the paper and published code:

    - A rank has sent the product of the common factor with **its** other one, not with the mean: nothing is lost over
      all ranks, and the residual is the error of the projection.
    - Factors are made orthonormal by a QR decomposition in float64, which accepts rank-deficient and zero matrices.

    The mean has the same bits on every rank if all have the same BLAS on the same kind of processor.
    """

    id: ClassVar[str] = "powersgd"
    family: ClassVar[str] = "low rank"
    message: ClassVar[str] = "own"
    averages: ClassVar[bool] = False
    needs_identical_blas: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Vogels et al. 2019, arXiv 1905.13727; residuals are of each rank's projection, QR in float64"
    )

    layer_setting: ClassVar[str | None] = "rank"

    rank: int = 16
    min_compression_rate: float = 2.0
    layers: Mapping[str, int] | None = None
    rows: int | None = None
    wire: str | None = field(default=None, kw_only=True)
    matrices: tuple[Matrix, ...] = bound(())  # the compressed matrices of a bucket

    def __post_init__(self) -> None:
        check_least("powersgd", "rank", self.rank, 1)
        if self.rows is not None:
            check_least("powersgd", "rows", self.rows, 1)
        check_choice("powersgd", "wire", self.wire, (None, "fp16", "bf16"))
        self._set(
            layers=check_layers("powersgd", "ranks", self.layers, partial(check_least, "powersgd")),
            min_compression_rate=check_range(
                "powersgd", "min_compression_rate", self.min_compression_rate, 0, float("inf")
            ),
        )

    feedback = True  # the residual keeps the error of the projection

    def wire_bytes_per_element(self, itemsize: int) -> float:
        side = 1 << 10
        rows = min(self.rows or side, side)
        return (1 / rows + 1 / side) * self.rank * (itemsize if self.wire is None else 2)

    def bind_to(self, bucket: BucketParameters) -> Self:
        found, start = [], 0
        for name, size, shape in zip(bucket.names, bucket.sizes, bucket.shapes, strict=True):
            if len(shape) > 1 and size:
                rows, columns = shape[0], prod(shape[1:])
                most = self.rows or rows
                for first in range(0, rows, most):
                    height = min(most, rows - first)
                    rank = min(self.rank_of(name), height, columns)
                    values = (height + columns) * rank  # sent in place of the matrix
                    if values * self.min_compression_rate < height * columns:
                        found.append(Matrix(start + first * columns, height, columns, rank))
            start += size
        return replace(self, matrices=tuple(found))

    def rank_of(self, name: str) -> int:
        """Return the rank asked for a parameter of this name, whatever its shape."""
        return int(match_layer_setting(self.layers, name, self.rank))
