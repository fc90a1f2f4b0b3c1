"""Sums of thin factors, one after the other."""

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme, far_from_largest, undelivered
from mpicomp.collectives.stacks import multiply, stacked
from mpicomp.compressors.accumulated import TAIL, Accumulated
from mpicomp.compressors.base import Compressor, Selection
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.powersgd import PowerSGD, orthonormal
from mpicomp.errors import MessageError
from mpicomp.kernels import cpu
from mpicomp.rounds import Group, Round


class LowRank(Scheme[PowerSGD]):
    """The mean of every matrix's left factors, then that of the right ones; what is no matrix goes with the first.

    The right factor of the step before, or a random one, gives the left factor of each rank's matrix; its mean, made
    orthonormal, is the basis on which every rank projects. Sums are linear in the matrices, so that any dense
    collective does them. In further iterations the mean of the right factors takes the place of the one of the step
    before; what the last one projects is delivered.

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
        self._stacks = stacked(compressor.matrices)
        self._left_size = sum(matrix.rows * matrix.rank for matrix in self._matrices)
        self._right_size = sum(matrix.columns * matrix.rank for matrix in self._matrices)
        self._held = sum(matrix.stop - matrix.start for matrix in self._matrices)

    @classmethod
    def upon(cls, compressor: Compressor) -> Compressor:
        """Factors are summed by a dense collective."""
        return Dense(wire=getattr(compressor, "wire", None))

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Give two sums an iteration, or one where everything is dense; see `Scheme.rounds`."""
        if not self._compresses(step):
            return self._sum.rounds(numel, dtype, group, step)
        sizes = [self._left_size, self._right_size] * self.compressor.iterations
        sizes[0] += numel - self._held
        return [task for size in sizes for task in self._sum.rounds(size, dtype, group, step)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Project, sum, project, sum; see `Scheme.exchange`."""
        if not self._compresses(context.step):
            return (yield from self._sum.exchange(accumulated, context))
        numel, dtype, workspace = accumulated.numel, accumulated.dtype, context.workspace
        left_size, right_size, rest_size = self._left_size, self._right_size, numel - self._held
        array = accumulated.array()
        finite = accumulated.finite and _projects_finitely(array, accumulated.energy)
        left = workspace.array("left", left_size + rest_size + TAIL, dtype)
        right = workspace.array("right", right_size + TAIL, dtype)
        kept_rest = workspace.array("rest", 2 * rest_size, dtype).reshape(2, rest_size)
        lefts, rights = self._lefts(left), self._rights(right)
        matrices = [stack.of(array) for stack in self._stacks]
        self._begin(rights, context)
        self._copy_rest(array, left[left_size:])
        nonfinite = stale = False
        problem: MessageError | None = None
        rest_lost = 0.0
        for iteration in range(self.compressor.iterations):
            for own, factor, product in zip(matrices, rights, lefts, strict=True):
                multiply(own, factor, product)
            size = left_size + (rest_size if iteration == 0 else 0)
            energy = cpu.energy(left[:size])
            ask = accumulated.stale or problem is not None
            part = Accumulated.ready(left[: size + TAIL], energy, 0.0, finite, ask)
            first = yield from self._sum.exchange(part, context)
            assert not isinstance(first.sent, Selection)
            problem = problem or first.problem
            ask = accumulated.stale or problem is not None
            if iteration == 0:
                rest = left[left_size:size]
                kept_rest[0], kept_rest[1] = first.mean[left_size:], first.sent[left_size:]
                rest_lost = cpu.energy(rest - kept_rest[1]) - cpu.energy(rest)
            bases = [orthonormal(_finite(mean)) for mean in self._lefts(first.mean)]

            for own, basis, product in zip(matrices, bases, rights, strict=True):
                multiply(own.transpose(0, 2, 1), basis, product)
            # The bases are orthonormal, so the factors have the energy of what is projected.
            lost = max(0.0, accumulated.energy - cpu.energy(right[:right_size]) + rest_lost)
            part = Accumulated.ready(right, accumulated.energy, lost, finite, ask)
            second = yield from self._sum.exchange(part, context)
            problem = problem or second.problem
            nonfinite = nonfinite or first.nonfinite or second.nonfinite
            stale = stale or first.stale or second.stale
            if iteration + 1 < self.compressor.iterations:
                self._scale(self._rights(second.mean), rights, context)

        if problem is not None:
            return undelivered(accumulated, problem, stale)
        assert not isinstance(second.sent, Selection)
        mean, sent = (workspace.array(name, numel, dtype) for name in ("low-rank mean", "low-rank sent"))
        for whole, factors in ((mean, second.mean), (sent, second.sent)):
            for stack, basis, factor in zip(self._stacks, bases, self._rights(factors), strict=True):
                multiply(basis, factor.transpose(0, 2, 1), stack.of(whole))
        if not nonfinite:
            self._scale(self._rights(second.mean), rights, context)
            self._keep(rights, context)
        for whole, values in zip((mean, sent), kept_rest, strict=True):
            self._put_rest(values, whole)
        iterations = self.compressor.iterations
        return Result(
            mean=mean,
            sent=sent,
            energy=second.energy,
            gain=second.gain,
            kept=float(rest_size + iterations * (left_size + right_size)),
            nonfinite=nonfinite,
            stale=stale,
            thinned=[(m.start, m.stop, iterations * m.rank * (m.rows + m.columns)) for m in self._matrices],
        )

    def _compresses(self, step: int) -> bool:
        return bool(self._matrices) and step >= self.compressor.start_step

    def _lefts(self, array: NDArray[np.floating]) -> list[NDArray[np.floating]]:
        """Give the left factors of each stack, shape (count, rows, rank), in an array that holds all of them."""
        return _parts(array, [(stack.count, stack.first.rows, stack.first.rank) for stack in self._stacks])

    def _rights(self, array: NDArray[np.floating]) -> list[NDArray[np.floating]]:
        """Give the right factors of each stack, shape (count, columns, rank), in an array that holds all of them."""
        return _parts(array, [(stack.count, stack.first.columns, stack.first.rank) for stack in self._stacks])

    def _begin(self, rights: list[NDArray[np.floating]], context: Context) -> None:
        """Write the right factors to begin with, the same on all ranks.

        Of a matrix whose rank has changed the columns that are known go on, and others are random.
        """
        known = context.memory.get("factors", []) if self.compressor.warm_start else []
        begun = {}
        if len(known) == len(self._matrices):
            pairs = zip(self._matrices, known, strict=True)
            begun = {matrix.start: factor for matrix, factor in pairs if len(factor) == matrix.columns}
        random = None
        for stack, factors in zip(self._stacks, rights, strict=True):
            for start, factor in zip(stack.starts, factors, strict=True):
                before = begun.get(start)
                columns = 0 if before is None else min(before.shape[1], factor.shape[1])
                if before is not None:
                    factor[:, :columns] = before[:, :columns]
                if columns < factor.shape[1]:
                    random = random or context.random(shared=True)
                    factor[:, columns:] = random.standard_normal((len(factor), factor.shape[1] - columns))

    def _keep(self, rights: list[NDArray[np.floating]], context: Context) -> None:
        """Keep the right factors for the next step."""
        ends = {
            start: factor.copy()
            for stack, factors in zip(self._stacks, rights, strict=True)
            for start, factor in zip(stack.starts, factors, strict=True)
        }
        context.memory["factors"] = [ends[matrix.start] for matrix in self._matrices]

    def _scale(self, factors: list[NDArray[np.floating]], out: list[NDArray[np.floating]], context: Context) -> None:
        """Write factors to begin anew with: only their spans matter, which must not grow from step to step."""
        for own, scaled in zip(factors, out, strict=True):
            largest = np.abs(own).max(axis=1, keepdims=True)
            with np.errstate(invalid="ignore"):
                np.divide(own, np.where(largest > 0, largest, 1), out=scaled)
            empty = np.broadcast_to(largest == 0, own.shape)
            if empty.any():
                scaled[empty] = context.random(shared=True).standard_normal(own.shape)[empty]

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


def _parts(array: NDArray[np.floating], shapes: list[tuple[int, int, int]]) -> list[NDArray[np.floating]]:
    """Cut an array in parts of some shapes, which are views of it."""
    parts, place = [], 0
    for shape in shapes:
        size = shape[0] * shape[1] * shape[2]
        parts.append(array[place : place + size].reshape(shape))
        place += size
    return parts


def _projects_finitely(array: NDArray[np.floating], energy: float) -> bool:
    """Tell whether all projections of an array, and what they leave, are finite: none is longer than the array."""
    if far_from_largest(energy, array.dtype):
        return True
    longest = float(np.abs(array).max()) * math.sqrt(array.size)
    return 16 * longest < float(np.finfo(array.dtype).max)


def _finite(factors: NDArray[np.floating]) -> NDArray[np.floating]:
    """Give a stack in which those that hold NaN or infinity are zeros."""
    if np.isfinite(factors).all():
        return factors
    zeros: NDArray[np.floating] = np.where(np.isfinite(factors).all(axis=(1, 2), keepdims=True), factors, 0)
    return zeros
