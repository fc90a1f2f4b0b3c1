"""Two sums of thin factors, one after the other."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.round import Group, Round
from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme
from mpicomp.compressors.accumulated import TAIL, Accumulated
from mpicomp.compressors.base import Compressor, Selection
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.powersgd import Matrix, PowerSGD, orthonormal
from mpicomp.kernels import cpu


class LowRank(Scheme[PowerSGD]):
    """The mean of every matrix's left factors, then that of the right ones; what is no matrix goes with the first.

    The right factor of the step before, or a random one, gives the left factor of each rank's matrix; its mean, made
    orthonormal, is the basis on which every rank projects. Sums are linear in the matrices, so that any dense
    collective does them.

    Parameters
    ----------
    compressor : PowerSGD
        Knows the bucket's matrices.
    inner : Scheme
        Sums the factors.
    """

    id: ClassVar[str] = "low-rank"
    paper: ClassVar[str] = "the exchange of PowerSGD, Vogels et al. 2019, arXiv 1905.13727"
    messages: ClassVar[str] = "factors"

    def __init__(self, compressor: PowerSGD, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner
        self._matrices = compressor.matrices

    @classmethod
    def upon(cls, compressor: Compressor) -> Compressor:
        """Factors are summed by a dense collective."""
        return Dense(wire=getattr(compressor, "wire", None))

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Give two sums, or one where everything is dense; see `Scheme.rounds`."""
        if not self._compresses(step):
            return self._sum.rounds(numel, dtype, group, step)
        left, right = self._lengths(numel)
        return [*self._sum.rounds(left, dtype, group, step), *self._sum.rounds(right, dtype, group, step)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Project, sum, project, sum; see `Scheme.exchange`."""
        if not self._compresses(context.step):
            return (yield from self._sum.exchange(accumulated, context))
        numel, dtype, workspace = accumulated.numel, accumulated.dtype, context.workspace
        array = accumulated.array()
        left_size, right_size = self._lengths(numel)

        right = workspace.array("right", right_size + TAIL, dtype)
        starts = self._start(context, dtype)
        left = workspace.array("left", left_size + TAIL, dtype)
        place = 0
        for matrix, start in zip(self._matrices, starts, strict=True):
            size = matrix.rows * matrix.rank
            _product(_of(array, matrix), start, left[place : place + size].reshape(matrix.rows, matrix.rank))
            place += size
        rest = left[place:left_size]
        self._copy_rest(array, rest)
        part = Accumulated.ready(left, cpu.energy(left[:left_size]), 0.0, accumulated.finite, accumulated.stale)
        first = yield from self._sum.exchange(part, context)
        assert not isinstance(first.sent, Selection)
        kept_rest = workspace.array("rest", 2 * rest.size, dtype).reshape(2, rest.size)
        kept_rest[0], kept_rest[1] = first.mean[place:], first.sent[place:left_size]

        bases, place = [], 0
        for matrix in self._matrices:
            size = matrix.rows * matrix.rank
            own = first.mean[place : place + size].reshape(matrix.rows, matrix.rank)
            bases.append(orthonormal(own if np.isfinite(own).all() else np.zeros_like(own)))
            place += size
        place = 0
        for matrix, basis in zip(self._matrices, bases, strict=True):
            size = matrix.columns * matrix.rank
            thin = right[place : place + size].reshape(matrix.columns, matrix.rank)
            _product(_of(array, matrix).T, basis, thin)
            place += size
        # The bases are orthonormal, so the factors have the energy of what is projected.
        rest_lost = cpu.energy(rest - kept_rest[1]) - cpu.energy(rest)
        lost = max(0.0, accumulated.energy - cpu.energy(right[:right_size]) + rest_lost)
        part = Accumulated.ready(right, accumulated.energy, lost, accumulated.finite, accumulated.stale)
        second = yield from self._sum.exchange(part, context)
        assert not isinstance(second.sent, Selection)

        mean, sent = (workspace.array(name, numel, dtype) for name in ("low-rank mean", "low-rank sent"))
        nonfinite = first.nonfinite or second.nonfinite
        place, ends = 0, []
        for matrix, basis in zip(self._matrices, bases, strict=True):
            size = matrix.columns * matrix.rank
            for whole_array, factor in ((mean, second.mean), (sent, second.sent)):
                thin = factor[place : place + size].reshape(matrix.columns, matrix.rank)
                _product(basis, thin.T, _of(whole_array, matrix))
            ends.append(second.mean[place : place + size].reshape(matrix.columns, matrix.rank))
            place += size
        if not nonfinite:
            context.memory["factors"] = [_scaled(factor, context) for factor in ends]
        for whole_array, values in zip((mean, sent), kept_rest, strict=True):
            self._put_rest(values, whole_array)
        return Result(
            mean=mean,
            sent=sent,
            energy=second.energy,
            gain=second.gain,
            kept=float(left_size + right_size),
            nonfinite=nonfinite,
            stale=first.stale or second.stale,
        )

    def _compresses(self, step: int) -> bool:
        return bool(self._matrices) and step >= self.compressor.start_step

    def _lengths(self, numel: int) -> tuple[int, int]:
        """Give the elements of the left factors with everything that is no matrix, and those of the right ones."""
        rest = numel - sum(matrix.stop - matrix.start for matrix in self._matrices)
        left = sum(matrix.rows * matrix.rank for matrix in self._matrices)
        return left + rest, sum(matrix.columns * matrix.rank for matrix in self._matrices)

    def _start(self, context: Context, dtype: np.dtype[Any]) -> list[NDArray[np.floating]]:
        """Give the right factors to begin with, the same on all ranks."""
        shapes = [(matrix.columns, matrix.rank) for matrix in self._matrices]
        known = context.memory.get("factors", [])
        if self.compressor.warm_start and [factor.shape for factor in known] == shapes:
            return [factor.astype(dtype, copy=False) for factor in known]
        random = context.random(shared=True)
        return [random.standard_normal(shape).astype(dtype) for shape in shapes]

    def _copy_rest(self, array: NDArray[np.floating], out: NDArray[np.floating]) -> None:
        place = 0
        for start, stop in self._gaps(array.size):
            out[place : place + stop - start] = array[start:stop]
            place += stop - start

    def _put_rest(self, values: NDArray[np.floating], array: NDArray[np.floating]) -> None:
        place = 0
        for start, stop in self._gaps(array.size):
            array[start:stop] = values[place : place + stop - start]
            place += stop - start

    def _gaps(self, numel: int) -> list[tuple[int, int]]:
        """Give starts and stops of what is no matrix."""
        bounds = [0, *(bound for matrix in self._matrices for bound in (matrix.start, matrix.stop)), numel]
        return [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if stop > start]


def _product(left: NDArray[np.floating], right: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    """Write a product; what is not finite is told by flags."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.matmul(left, right, out=out)


def _scaled(factor: NDArray[np.floating], context: Context) -> NDArray[np.floating]:
    """Give a factor to begin the next step with: only its span matters, which must not grow from step to step."""
    largest = np.abs(factor).max(axis=0)
    scaled: NDArray[np.floating] = factor / np.where(largest > 0, largest, 1)
    empty = largest == 0
    if empty.any():
        scaled[:, empty] = context.random(shared=True).standard_normal(factor.shape)[:, empty]
    return scaled


def _of(array: NDArray[np.floating], matrix: Matrix) -> NDArray[np.floating]:
    """Give a matrix's part of the bucket."""
    return array[matrix.start : matrix.stop].reshape(matrix.rows, matrix.columns)
