"""Low rank: a matrix travels as the product of two thin ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import isqrt, prod
from typing import Any, ClassVar

import numpy as np

from mpicomp.compressors.base import Compressor, check_choice, check_range
from mpicomp.compressors.registry import register_compressor
from mpicomp.errors import ConfigurationError


@dataclass(frozen=True)
class Matrix:
    """A parameter that travels as two factors: where it starts in its bucket, its sides, and their common rank."""

    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.rows * self.columns


@register_compressor
@dataclass(frozen=True, repr=False)
class PowerSGD(Compressor):
    """PowerSGD (arXiv 1905.13727): each matrix is projected on a few directions, which follow it from step to step.

    A parameter is the matrix of its first dimension against all others. Where that would not save enough, and in one
    dimension, it travels dense.

    Parameters
    ----------
    rank : int
        Columns of the factors, at most the matrix's smaller side.
    min_compression_rate : float
        Only matrices of which less than the inverse of this is sent are compressed:
        ``(rows + columns) * rank * iterations * min_compression_rate < rows * columns``.
    start_step : int
        Steps before this one are dense.
    warm_start : bool
        Whether a step begins with the factor of the one before, and not with a random one.
    layers : mapping of str to int, optional
        Ranks of their own for parameters whose names match a pattern (as file names do: ``"embedding.*"``); the first
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
    Names and defaults are those of PyTorch's hook, but for ``start_step``, which is 1000 there, ``iterations`` and
    ``rows``.
    Different from the paper and published code:

    - What a rank has sent is the product of the common factor with its **own** other one, not with the mean: so
      nothing is lost over all ranks, and the residual is what the projection left out.
    - Factors are made orthonormal by a QR decomposition in float64, which a rank-deficient or zero matrix does not
      upset.
    - Several iterations are those of the paper, the power method on the ranks' mean. The authors' later package does
      half of one in a step, in which one factor travels, and then the next half on what is left.

    Every rank multiplies by itself what all have summed, by the library that NumPy has: the mean is the same bits on
    every rank where they all have the same library on the same kind of processor.

    Examples
    --------
    >>> compressor = PowerSGD(rank=2).within(["w", "b"], [64 * 32, 64], [(64, 32), (64,)])
    >>> compressor.matrices
    (Matrix(start=0, rows=64, columns=32, rank=2),)
    """

    id: ClassVar[str] = "powersgd"
    family: ClassVar[str] = "low rank"
    message: ClassVar[str] = "factors"
    paper: ClassVar[str] = (
        "Vogels et al. 2019, arXiv 1905.13727; residuals are of each rank's own projection, QR in float64"
    )

    rank: int = 1
    min_compression_rate: float = 2.0
    start_step: int = 0
    warm_start: bool = True
    layers: Mapping[str, int] | None = None
    iterations: int = 1
    rows: int | None = None
    wire: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0), ("iterations", 1)):
            _check_least(name, getattr(self, name), least)
        if self.rows is not None:
            _check_least("rows", self.rows, 1)
        if self.layers is not None:
            if not isinstance(self.layers, Mapping):
                raise ConfigurationError(f"powersgd: layers must map names to ranks, got {self.layers!r}")
            for pattern, own in self.layers.items():
                _check_least(f"layers['{pattern}']", own, 1)
            object.__setattr__(self, "layers", {str(pattern): own for pattern, own in self.layers.items()})
        check_range("powersgd", "min_compression_rate", self.min_compression_rate, 0, float("inf"))
        check_choice("powersgd", "warm_start", self.warm_start, (True, False))
        check_choice("powersgd", "wire", self.wire, (None, "fp16", "bf16"))
        object.__setattr__(self, "min_compression_rate", float(self.min_compression_rate))
        object.__setattr__(self, "warm_start", bool(self.warm_start))

    @property
    def feedback(self) -> bool:
        """What the projection leaves out has to be kept."""
        return True

    @property
    def settled(self) -> "PowerSGD":
        """Give one that compresses from the first step on."""
        return replace(self, start_step=0)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """What is compressed; nothing, before shapes are known."""
        return ()

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Give both factors' elements for a square matrix of 2**20."""
        side = 1 << 10
        rows = min(self.rows or side, side)
        return (1 / rows + 1 / side) * self.rank * self.iterations * (itemsize if self.wire is None else 2)

    def within(self, names: Sequence[str], sizes: Sequence[int], shapes: Sequence[tuple[int, ...]] = ()) -> "PowerSGD":
        """Give the compressor for a bucket of these parameters; see `Compressor.within`."""
        found, start = [], 0
        for name, size, shape in zip(names, sizes, shapes or [(size,) for size in sizes], strict=True):
            if len(shape) > 1 and size:
                rows, columns = shape[0], prod(shape[1:])
                most = self.rows or rows
                parts = [(first, min(most, rows - first)) for first in range(0, rows, most)]
                found += [
                    Matrix(start + first * columns, own, columns, rank)
                    for first, own in parts
                    if (rank := self._rank_within(name, own, columns))
                ]
            start += size
        return _Shaped(**_parameters(self), found=tuple(found))

    def _rank_within(self, name: str, rows: int, columns: int) -> int:
        """Give the rank at which a matrix is sent; 0 where it travels dense."""
        rank = min(self.rank_of(name), rows, columns)
        saves = (rows + columns) * rank * self.iterations * self.min_compression_rate < rows * columns
        return rank if saves else 0

    def rank_of(self, name: str) -> int:
        """Give the rank that a parameter of this name is asked for, however small it is."""
        return next((own for pattern, own in (self.layers or {}).items() if fnmatchcase(name, pattern)), self.rank)


@dataclass(frozen=True, repr=False)
class _Shaped(PowerSGD):
    """PowerSGD for one bucket, its matrices known."""

    found: tuple[Matrix, ...] = field(default=(), kw_only=True)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.found

    def of_length(self, numel: int) -> PowerSGD:
        if not self.found:
            return self  # dense, whatever the length
        rows = isqrt(numel)
        return self.within([""], [rows * (numel // rows)], [(rows, numel // rows)])

    def get_config(self) -> dict[str, Any]:
        return {"id": self.id} | _parameters(self)


def _check_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"powersgd: {name} must be an integer of at least {least}, got {value!r}")


def _parameters(compressor: PowerSGD) -> dict[str, Any]:
    names = ("rank", "min_compression_rate", "start_step", "warm_start", "layers", "iterations", "rows", "wire")
    return {name: getattr(compressor, name) for name in names}


def orthonormal(matrix: "np.ndarray[Any, np.dtype[Any]]") -> "np.ndarray[Any, np.dtype[Any]]":
    """Give an orthonormal basis of as many columns, which holds the span of the matrix's; of its dtype.

    Shape (rows, rank) with at least as many rows, or a stack of such. The same bits for the same matrix.
    """
    basis, _ = np.linalg.qr(matrix.astype(np.float64))
    return basis.astype(matrix.dtype)
