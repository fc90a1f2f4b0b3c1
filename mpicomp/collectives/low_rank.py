"""The exchange of PowerSGD: factors of all matrices are summed one after the other."""

import math
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, Result, Scheme, failed_result, far_from_largest
from mpicomp.compressors.accumulated import TRAILER, Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.powersgd import PowerSGD, Stack, multiply, orthogonalize, stacked
from mpicomp.compressors.wire import Selection
from mpicomp.errors import MessageError
from mpicomp.gpu import current_device, to_python
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.registry import register

Stacks = list[NDArray[np.floating]]


@register
class LowRank(Scheme[PowerSGD]):
    """Sums of all matrices' left factors, then of the right ones; all other parameters travel with the first sum.

    Sums are linear in the matrices, so any dense collective can be the inner one.
    """

    id: ClassVar[str] = "low-rank"
    paper: ClassVar[str] = "the exchange of PowerSGD, Vogels et al. 2019, arXiv 1905.13727"
    messages: ClassVar[str] = "own"
    owner: ClassVar[type[Compressor]] = PowerSGD

    def __init__(self, compressor: PowerSGD, inner: Scheme[Dense]) -> None:
        super().__init__(compressor)
        self._sum = inner
        self._matrices = compressor.matrices
        self._stacks: tuple[Stack, ...] = ()
        self._rest: list[tuple[slice, slice]] = []
        self._numel = -1
        self._left_size = sum(matrix.rows * matrix.rank for matrix in self._matrices)
        self._right_size = sum(matrix.columns * matrix.rank for matrix in self._matrices)
        self._held = sum(matrix.stop - matrix.start for matrix in self._matrices)

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        return Dense(wire=getattr(compressor, "wire", None))

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        if not self._matrices:
            return self._sum.rounds(numel, dtype, group, step)
        sizes = self._left_size + numel - self._held, self._right_size
        return [task for size in sizes for task in self._sum.rounds(size, dtype, group, step)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        if not self._matrices:
            return (yield from self._sum.exchange(accumulated, context))
        numel, workspace = accumulated.numel, context.workspace
        if numel != self._numel:
            self._numel, self._stacks = numel, stacked(self._matrices, numel)
            self._rest = list(self._slices_of_rest(numel))
        sizes = self._left_size, self._right_size, numel - self._held
        sums = _FactorSums(self._sum, accumulated, context, sizes)
        matrices = [stack.of(accumulated.array()) for stack in self._stacks]
        lefts, rights = self._factors(sums.left, True), self._factors(sums.right)
        self._begin(rights, context)
        for part, packed in self._rest:
            sums.rest[packed] = accumulated.array()[part]
        # Algorithm 1 of the paper
        for matrix, p, q in zip(matrices, lefts, rights, strict=True):
            multiply(matrix, q, p)  # P = M Q
        means = self._factors((yield from sums.average_left()), True)
        bases = [orthogonalize(sums.finite(p)) for p in means]
        for matrix, p, q in zip(matrices, bases, rights, strict=True):
            multiply(matrix.transpose(0, 2, 1), p, q)  # Q = M^T P
        yield from sums.average_right()
        second, problem = sums.right_sum, sums.problem
        if problem is not None:
            return failed_result(accumulated, problem, sums.stale)
        following = self._factors(sums.right_mean)
        largest, has_empty = [np.abs(factor).max(axis=1, keepdims=True) for factor in following], False  # of columns
        if not sums.nonfinite:  # the host waits here, before the products below
            [has_empty] = to_python((np.concatenate([size.reshape(-1) for size in largest]) == 0).any())
        # P Q^T with the mean Q is the mean; with this rank's Q it is this rank's share.
        assert not isinstance(second.sent, Selection)
        mean, sent = (workspace.array(name, numel, accumulated.dtype) for name in ("low-rank mean", "low-rank sent"))
        for whole, factors in ((mean, sums.right_mean), (sent, second.sent)):
            for stack, basis, factor in zip(self._stacks, bases, self._factors(factors), strict=True):
                multiply(basis, factor.transpose(0, 2, 1), stack.of(whole))
        if not sums.nonfinite:
            _scale(following, largest, has_empty, rights, context)
            self._keep(rights, context)
        for whole, values in zip((mean, sent), sums.delivered_rest, strict=True):
            for part, packed in self._rest:
                whole[part] = values[packed]
        kept = float(sums.rest.size + self._left_size + self._right_size)
        return replace(second, mean=mean, sent=sent, kept=kept, nonfinite=sums.nonfinite, stale=sums.stale)

    def _factors(self, array: NDArray[np.floating], left: bool = False) -> Stacks:
        """Return views of the factors of each stack, shape (count, rows or columns, rank)."""
        parts, place = [], 0
        for stack in self._stacks:
            shape = stack.count, stack.first.rows if left else stack.first.columns, stack.first.rank
            parts.append(array[place : place + prod(shape)].reshape(shape))
            place += prod(shape)
        return parts

    def _begin(self, rights: Stacks, context: Context) -> None:
        """Write the initial right factors, the same on all ranks: known columns, and random ones for a larger rank."""
        known = context.memory.get("factors", [])
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
                    factor[:, :columns] = current_device().to_device(before)[:, :columns]
                if columns < factor.shape[1]:
                    random = random or context.random(shared=True)
                    drawn = random.standard_normal((len(factor), factor.shape[1] - columns))
                    factor[:, columns:] = current_device().to_device(drawn)

    def _keep(self, rights: Stacks, context: Context) -> None:
        ends = {
            start: factor
            for stack, factors in zip(self._stacks, rights, strict=True)
            for start, factor in zip(stack.starts, factors.copy(), strict=True)
        }
        context.memory["factors"] = [ends[matrix.start] for matrix in self._matrices]

    def _slices_of_rest(self, numel: int) -> Iterator[tuple[slice, slice]]:
        """Yield the places of the parts outside of matrices, in the bucket and in an array of all of them."""
        bounds, place = [0, *(end for matrix in self._matrices for end in (matrix.start, matrix.stop)), numel], 0
        for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
            if stop > start:
                yield slice(start, stop), slice(place, place + stop - start)
            place += stop - start


class _FactorSums:
    """Averages of a step's factors over ranks, and the faults and energies of these exchanges."""

    def __init__(
        self, inner: Scheme[Dense], accumulated: Accumulated, context: Context, sizes: tuple[int, int, int]
    ) -> None:
        left, right, rest = sizes
        dtype, workspace = accumulated.dtype, context.workspace
        self._inner, self._accumulated, self._context = inner, accumulated, context
        self._moments = accumulated.device_moments
        self._left_size, self._right_size, self._with_rest = left, right, True
        self.left = workspace.array("left", left + rest + TRAILER, dtype)
        self.right = workspace.array("right", right + TRAILER, dtype)
        self.rest = self.left[left : left + rest]  # parameters that are no matrices, sent with the first P
        self.delivered_rest = workspace.array("rest", 2 * rest, dtype).reshape(2, rest)
        self._rounding: tuple[Any, Any] = (0.0, 0.0)
        self.right_sum: Result
        self.right_mean: NDArray[np.floating]
        self.problem: MessageError | None = None
        self.nonfinite = self.stale = False
        self._left_is_finite = True

    def average_left(self) -> Rounds[NDArray[np.floating]]:
        """Return the mean P, which may hold NaN or infinity; see `finite`."""
        size = self._left_size + (self.rest.size if self._with_rest else 0)
        finite = self._moments.finite
        energy = kernels.energy(self.left[:size])
        first, left_mean = yield from self._sum(self.left[: size + TRAILER], energy, 0.0, finite)
        assert not isinstance(first.sent, Selection)
        if self._with_rest:
            self._with_rest = False
            self.delivered_rest[0] = left_mean[self._left_size :]
            self.delivered_rest[1] = first.sent[self._left_size :]
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                rounded = kernels.energy(self.rest - self.delivered_rest[1])
            self._rounding = rounded, kernels.energy(self.rest)
        self._left_is_finite = not first.nonfinite
        return left_mean

    def finite(self, stack: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return a stack of the mean P with zeros in place of matrices that are not finite."""
        if self._left_is_finite:
            return stack
        return np.where(np.isfinite(stack).all(axis=(1, 2), keepdims=True), stack, 0)

    def average_right(self) -> Rounds[None]:
        """Average Q, and report the energy lost by the projection."""
        # P is orthonormal, so Q has the energy of the projection.
        energy, finite, projected, rounded, rest_energy = to_python(
            self._moments.energy, self._moments.finite, kernels.energy(self.right[: self._right_size]), *self._rounding
        )
        lost = max(0.0, energy - projected + (rounded - rest_energy))
        array = self._accumulated.array()
        if finite and not far_from_largest(energy, array.dtype):  # no projection is longer than the array
            [largest] = to_python(np.abs(array).max())
            finite = 16 * float(largest) * math.sqrt(array.size) < float(np.finfo(array.dtype).max)
        self.right_sum, self.right_mean = yield from self._sum(self.right, energy, lost, finite)

    def _sum(
        self, factors: NDArray[np.floating], energy: Any, lost: float, finite: Any
    ) -> Rounds[tuple[Result, NDArray[np.floating]]]:
        asks = self._accumulated.stale or self.problem is not None
        part = Accumulated.ready(factors, energy, lost, finite, asks)
        result = yield from self._inner.exchange(part, self._context)
        self.problem = self.problem or result.problem
        self.nonfinite |= result.nonfinite
        self.stale |= result.stale
        return result, result.mean_array(part, self._context.workspace)


def _scale(factors: Stacks, largest: Stacks, empty: bool, out: Stacks, context: Context) -> None:
    """Write factors for the next step: only their spans matter, and numbers must not grow from step to step."""
    for factor, size, scaled in zip(factors, largest, out, strict=True):
        with np.errstate(invalid="ignore"):
            np.divide(factor, np.where(size > 0, size, 1), out=scaled)
    if empty:
        for size, scaled in zip(largest, out, strict=True):
            drawn = context.random(shared=True).standard_normal(scaled.shape).astype(scaled.dtype)
            np.copyto(scaled, np.where(size == 0, current_device().to_device(drawn), scaled))
