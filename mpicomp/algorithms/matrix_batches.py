"""Matrices inside a flat array, those of one shape in a stack, so that one product serves them all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
