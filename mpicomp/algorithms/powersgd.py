"""PowerSGD: a matrix travels as the product of two thin ones, whose sums are made one after the other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.algorithms.matrix_batches import Matrix, Stack, multiply, orthogonalize, stacked
from mpicomp.collectives.scheme import Exchange, Result, Scheme, far_from_largest, undelivered
from mpicomp.compressors.base_compressor import Compressor, bound, match_layer_setting
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import current_device, to_python
from mpicomp.errors import ConfigurationError, MessageError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round, Rounds
from mpicomp.setting_checks import check_choice, check_least, check_range

Stacks = list[NDArray[np.floating]]


@register
@dataclass(frozen=True, repr=False)
class PowerSGD(Compressor):
    """PowerSGD (arXiv 1905.13727): each matrix is projected on a few directions, which follow it from step to step.

    A parameter is the matrix of its first dimension against all others. Where that would not save enough, and in one
    dimension, it travels dense.

    Parameters
    ----------
    rank : int
        Columns of the factors, at most the matrix's smaller side. The default is the least power of two with which a
        language model of 300 steps ends within 2 % of dense, see docs/compressors.md.
    min_compression_rate : float
        Only matrices of which less than the inverse of this is sent are compressed:
        ``(rows + columns) * rank * iterations * min_compression_rate < rows * columns``.
    start_step : int
        Steps before this one are dense.
    warm_start : bool
        Whether a step begins with the factor of the one before, and not with a random one.
    layers : mapping of str to int, optional
        Other ranks for parameters whose names match a pattern (as file names do: ``"embedding.*"``); the first
        pattern that matches counts.
    iterations : int
        Power iterations in a step. Each sends both factors: it takes two sums, and as many bytes as the first one. With
        a warm start one is enough where gradients change slowly; more of them come nearer to the best approximation
        of this rank, never beyond it.
    rows : int, optional
        A matrix with more rows is cut in several of at most this many, each of which has this rank: more directions for
        more bytes. What a matrix of many rows holds, as an embedding does, has little in common.
    wire : {None, "fp16", "bf16"}
        How factors travel; the 16-bit forms are summed in at least float32.

    Notes
    -----
    Names and defaults are those of PyTorch's hook, but for ``rank`` and ``start_step``, which are 1 and 1000 there,
    ``iterations`` and ``rows``.
    Different from the paper and published code:

    - What a rank has sent is the product of the common factor with **its** other one, not with the mean: so
      nothing is lost over all ranks, and the residual is what the projection left out.
    - Factors are made orthonormal by a QR decomposition in float64, which a rank-deficient or zero matrix does not
      upset.
    - Several iterations are those of the paper, the power method on the ranks' mean. The authors' later package does
      half of one in a step, in which one factor travels, and then the next half on what is left.

    Every rank multiplies by itself what all have summed, by the library that NumPy has: the mean is the same bits on
    every rank where they all have the same library on the same kind of processor.

    Examples
    --------
    >>> compressor = PowerSGD(rank=2).bind(["w", "b"], [64 * 32, 64], [(64, 32), (64,)])
    >>> compressor.matrices
    (Matrix(start=0, rows=64, columns=32, rank=2),)
    """

    id: ClassVar[str] = "powersgd"
    family: ClassVar[str] = "low rank"
    message: ClassVar[str] = "factors"
    needs_identical_blas: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Vogels et al. 2019, arXiv 1905.13727; residuals are of each rank's projection, QR in float64"
    )

    layer_setting: ClassVar[str | None] = "rank"

    rank: int = 16
    min_compression_rate: float = 2.0
    start_step: int = 0
    warm_start: bool = True
    layers: Mapping[str, int] | None = None
    iterations: int = 1
    rows: int | None = None
    wire: str | None = field(default=None, kw_only=True)
    matrices: tuple[Matrix, ...] = bound(())
    """The matrices that are compressed; empty before shapes are known."""

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0), ("iterations", 1)):
            check_least("powersgd", name, getattr(self, name), least)
        if self.rows is not None:
            check_least("powersgd", "rows", self.rows, 1)
        if self.layers is not None:
            if not isinstance(self.layers, Mapping):
                raise ConfigurationError(f"powersgd: layers must map names to ranks, got {self.layers!r}")
            for pattern, rank in self.layers.items():
                check_least("powersgd", f"layers['{pattern}']", rank, 1)
            object.__setattr__(self, "layers", {str(pattern): rank for pattern, rank in self.layers.items()})
        check_range("powersgd", "min_compression_rate", self.min_compression_rate, 0, float("inf"))
        check_choice("powersgd", "warm_start", self.warm_start, (True, False))
        check_choice("powersgd", "wire", self.wire, (None, "fp16", "bf16"))
        object.__setattr__(self, "min_compression_rate", float(self.min_compression_rate))
        object.__setattr__(self, "warm_start", bool(self.warm_start))

    @property
    def feedback(self) -> bool:
        # The error of the projection is kept in the residual.
        return True

    def wire_bytes_per_element(self, itemsize: int) -> float:
        side = 1 << 10
        rows = min(self.rows or side, side)
        return (1 / rows + 1 / side) * self.rank * self.iterations * (itemsize if self.wire is None else 2)

    def bind(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]] = (),
        *,
        model: Mapping[str, int] | None = None,
        warm_up: bool = True,
    ) -> "PowerSGD":
        found, start = [], 0
        for name, size, shape in zip(names, sizes, shapes or [(size,) for size in sizes], strict=True):
            if len(shape) > 1 and size:
                rows, columns = shape[0], prod(shape[1:])
                most = self.rows or rows
                parts = [(first, min(most, rows - first)) for first in range(0, rows, most)]
                found += [
                    Matrix(start + first * columns, height, columns, rank)
                    for first, height in parts
                    if (rank := self._rank_within(name, height, columns))
                ]
            start += size
        return replace(self, start_step=self.start_step if warm_up else 0, matrices=tuple(found))

    def _rank_within(self, name: str, rows: int, columns: int) -> int:
        """Return the rank at which a matrix is sent; 0 where it travels dense."""
        rank = min(self.rank_of(name), rows, columns)
        saves = (rows + columns) * rank * self.iterations * self.min_compression_rate < rows * columns
        return rank if saves else 0

    def rank_of(self, name: str) -> int:
        """Return the rank that a parameter of this name is asked for, however small it is."""
        return int(match_layer_setting(self.layers, name, self.rank))


@register
class LowRank(Scheme[PowerSGD]):
    """The mean of every matrix's left factors, then that of the right ones; all other parameters go with the first.

    The right factor of the step before, or a random one, yields the left factor of each rank's matrix; its mean, made
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
        self._stacks: tuple[Stack, ...] = ()
        self._numel = -1
        self._left_size = sum(matrix.rows * matrix.rank for matrix in self._matrices)
        self._right_size = sum(matrix.columns * matrix.rank for matrix in self._matrices)
        self._held = sum(matrix.stop - matrix.start for matrix in self._matrices)

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        return Dense(wire=getattr(compressor, "wire", None))

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        if not self._compresses(step):
            return self._sum.rounds(numel, dtype, group, step)
        sizes = [self._left_size, self._right_size] * self.compressor.iterations
        sizes[0] += numel - self._held
        return [task for size in sizes for task in self._sum.rounds(size, dtype, group, step)]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        if not self._compresses(context.step):
            return (yield from self._sum.exchange(accumulated, context))
        numel, workspace = accumulated.numel, context.workspace
        if numel != self._numel:
            self._numel, self._stacks = numel, stacked(self._matrices, numel)
        sums = _FactorSums(self._sum, accumulated, context, self._left_size, self._right_size, numel - self._held)
        matrices = [stack.of(accumulated.array()) for stack in self._stacks]
        lefts, rights = self._lefts(sums.left), self._rights(sums.right)
        self._begin(rights, context)
        self._copy_rest(accumulated.array(), sums.rest)
        for iteration in range(self.compressor.iterations):
            if iteration > 0:
                following = self._rights(sums.right_sum.mean)
                _scale(following, *_largest(following), rights, context)
            bases = yield from self._factor_step(matrices, lefts, rights, sums)
        second, problem = sums.right_sum, sums.problem
        if problem is not None:
            return undelivered(accumulated, problem, sums.stale)
        following = self._rights(second.mean)
        largest = None if sums.nonfinite else _largest(following)  # waits for it, and for nothing that comes below
        # P Q^T with the mean Q is the mean, with this rank's Q it is what this rank has sent.
        assert not isinstance(second.sent, Selection)
        mean, sent = (workspace.array(name, numel, accumulated.dtype) for name in ("low-rank mean", "low-rank sent"))
        for whole, factors in ((mean, second.mean), (sent, second.sent)):
            for stack, basis, factor in zip(self._stacks, bases, self._rights(factors), strict=True):
                multiply(basis, factor.transpose(0, 2, 1), stack.of(whole))
        if largest is not None:
            _scale(following, *largest, rights, context)
            self._keep(rights, context)
        for whole, values in zip((mean, sent), sums.delivered_rest, strict=True):
            self._write_rest(values, whole)
        iterations = self.compressor.iterations
        return Result(
            mean=mean,
            sent=sent,
            energy=second.energy,
            gain=second.gain,
            kept=float(sums.rest.size + iterations * (self._left_size + self._right_size)),
            nonfinite=sums.nonfinite,
            stale=sums.stale,
            thinned=[(m.start, m.stop, iterations * m.rank * (m.rows + m.columns)) for m in self._matrices],
        )

    def _factor_step(self, matrices: Stacks, ps: Stacks, qs: Stacks, sums: "_FactorSums") -> Rounds[Stacks]:
        """Run one power iteration, algorithm 1 of the paper, and return the orthonormal P of each stack."""
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            multiply(matrix, q, p)  # P = M Q
        means = self._lefts((yield from sums.average_left()))
        bases = [orthogonalize(sums.finite(p)) for p in means]
        for matrix, p, q in zip(matrices, bases, qs, strict=True):
            multiply(matrix.transpose(0, 2, 1), p, q)  # Q = M^T P
        yield from sums.average_right()
        return bases

    def _compresses(self, step: int) -> bool:
        return bool(self._matrices) and step >= self.compressor.start_step

    def _lefts(self, array: NDArray[np.floating]) -> list[NDArray[np.floating]]:
        """Return the left factors of each stack, shape (count, rows, rank), in an array that holds all of them."""
        return _parts(array, [(stack.count, stack.first.rows, stack.first.rank) for stack in self._stacks])

    def _rights(self, array: NDArray[np.floating]) -> list[NDArray[np.floating]]:
        """Return the right factors of each stack, shape (count, columns, rank), in an array that holds all of them."""
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
                    factor[:, :columns] = current_device().to_device(before)[:, :columns]
                if columns < factor.shape[1]:
                    random = random or context.random(shared=True)
                    drawn = random.standard_normal((len(factor), factor.shape[1] - columns))
                    factor[:, columns:] = current_device().to_device(drawn)

    def _keep(self, rights: list[NDArray[np.floating]], context: Context) -> None:
        """Keep the right factors for the next step."""
        ends = {
            start: factor
            for stack, factors in zip(self._stacks, rights, strict=True)
            for start, factor in zip(stack.starts, factors.copy(), strict=True)
        }
        context.memory["factors"] = [ends[matrix.start] for matrix in self._matrices]

    def _copy_rest(self, array: NDArray[np.floating], out: NDArray[np.floating]) -> None:
        place = 0
        for start, stop in self._gaps(array.size):
            out[place : place + stop - start] = array[start:stop]
            place += stop - start

    def _write_rest(self, values: NDArray[np.floating], array: NDArray[np.floating]) -> None:
        place = 0
        for start, stop in self._gaps(array.size):
            array[start:stop] = values[place : place + stop - start]
            place += stop - start

    def _gaps(self, numel: int) -> list[tuple[int, int]]:
        """Return starts and stops of the parts that are in no matrix."""
        bounds = [0, *(bound for matrix in self._matrices for bound in (matrix.start, matrix.stop)), numel]
        return [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if stop > start]


class _FactorSums:
    """Averages of a step's factors over ranks, with the faults and the energies that they meet."""

    def __init__(
        self,
        inner: Scheme[Dense],
        accumulated: GradientWithResidual,
        context: Context,
        left: int,
        right: int,
        rest: int,
    ) -> None:
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
        self.problem: MessageError | None = None
        self.nonfinite = self.stale = False
        self._left_is_finite = True

    def average_left(self) -> Rounds[NDArray[np.floating]]:
        """Return the mean P; `finite` removes what is not finite from it."""
        size = self._left_size + (self.rest.size if self._with_rest else 0)
        finite = self._moments.finite
        first = yield from self._sum(self.left[: size + TRAILER], kernels.energy(self.left[:size]), 0.0, finite)
        assert not isinstance(first.sent, Selection)
        if self._with_rest:
            self._with_rest = False
            self.delivered_rest[0], self.delivered_rest[1] = (
                first.mean[self._left_size :],
                first.sent[self._left_size :],
            )
            with np.errstate(invalid="ignore"):  # an infinity that was sent is one that is left
                rounded = kernels.energy(self.rest - self.delivered_rest[1])
            self._rounding = rounded, kernels.energy(self.rest)
        self._left_is_finite = not first.nonfinite
        return first.mean

    def finite(self, stack: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return a stack of the mean P with zeros in place of matrices that hold NaN or infinity."""
        if self._left_is_finite:
            return stack
        return np.where(np.isfinite(stack).all(axis=(1, 2), keepdims=True), stack, 0)

    def average_right(self) -> Rounds[None]:
        """Average Q, and report the energy that the projection leaves out."""
        # P is orthonormal, so the factors have the energy of what is projected.
        energy, finite, projected, rounded, rest_energy = to_python(
            self._moments.energy, self._moments.finite, kernels.energy(self.right[: self._right_size]), *self._rounding
        )
        lost = max(0.0, energy - projected + (rounded - rest_energy))
        finite = finite and _projects_finitely(self._accumulated.array(), energy)
        self.right_sum = yield from self._sum(self.right, energy, lost, finite)

    def _sum(self, factors: NDArray[np.floating], energy: Any, lost: float, finite: Any) -> Exchange:
        asks = self._accumulated.stale or self.problem is not None
        part = GradientWithResidual.ready(factors, energy, lost, finite, asks)
        result = yield from self._inner.exchange(part, self._context)
        self.problem = self.problem or result.problem
        self.nonfinite |= result.nonfinite
        self.stale |= result.stale
        return result


def _parts(array: NDArray[np.floating], shapes: list[tuple[int, int, int]]) -> list[NDArray[np.floating]]:
    """Cut an array in parts of some shapes, which are views of it."""
    parts, place = [], 0
    for shape in shapes:
        size = shape[0] * shape[1] * shape[2]
        parts.append(array[place : place + size].reshape(shape))
        place += size
    return parts


def _largest(factors: list[NDArray[np.floating]]) -> tuple[list[NDArray[np.floating]], bool]:
    """Return the largest magnitude in each column of factors, shape (count, 1, rank), and whether one of them is 0."""
    largest = [np.abs(factor).max(axis=1, keepdims=True) for factor in factors]
    [empty] = to_python((np.concatenate([factor.reshape(-1) for factor in largest]) == 0).any())
    return largest, empty


def _scale(
    factors: list[NDArray[np.floating]],
    largest: list[NDArray[np.floating]],
    empty: bool,
    out: list[NDArray[np.floating]],
    context: Context,
) -> None:
    """Write factors to start the next step with: only their spans matter, which must not grow from step to step."""
    for factor, size, scaled in zip(factors, largest, out, strict=True):
        with np.errstate(invalid="ignore"):
            np.divide(factor, np.where(size > 0, size, 1), out=scaled)
    if empty:
        for size, scaled in zip(largest, out, strict=True):
            drawn = context.random(shared=True).standard_normal(scaled.shape).astype(scaled.dtype)
            np.copyto(scaled, np.where(size == 0, current_device().to_device(drawn), scaled))


def _projects_finitely(array: NDArray[np.floating], energy: float) -> bool:
    """Return whether all projections of an array, and its remainders, are finite: none is longer than the array."""
    if far_from_largest(energy, array.dtype):
        return True
    [largest] = to_python(np.abs(array).max())
    return 16 * float(largest) * math.sqrt(array.size) < float(np.finfo(array.dtype).max)
