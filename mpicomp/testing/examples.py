"""Arrays, compressors and ranks in one process that laws are checked with; no list names registered classes."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Result, fitting
from mpicomp.compressors import COMPRESSORS, Compressor, Sparsifier, get_compressor
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld
from mpicomp.policies.schedule import with_warmup
from mpicomp.reducer import Reducer

Array = NDArray[Any]  # float32 or float64

DTYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), np.dtype(np.float64))
PRECISION: dict[np.dtype[Any], float] = {np.dtype(np.float32): 2e-5, np.dtype(np.float64): 1e-12}

_SETTINGS = {"ratio": 0.05, "rank": 1}  # with which all laws have elements to check
_LENGTH = 1000  # of an array, for the number of selected elements


def example(cls: type[Compressor]) -> Compressor:
    """Return a compressor at its default parameters, except for a ratio of 0.05 and a rank of 1.

    Examples
    --------
    >>> import mpicomp
    >>> example(mpicomp.TopK), example(mpicomp.PowerSGD), example(mpicomp.OneBit)
    (TopK(ratio=0.05), PowerSGD(rank=1), OneBit())
    """
    names = {entry.name for entry in fields(cls)}
    return cls(**{name: value for name, value in _SETTINGS.items() if name in names})


def representatives() -> list[Compressor]:
    """Return a built-in compressor for each choice of collectives, of known or unknown length and kind of numbers."""
    found: dict[Any, Compressor] = {}
    for name in COMPRESSORS.names():
        if COMPRESSORS.plugin(name) is not None:
            continue
        cls = COMPRESSORS.cls(name)
        plain = example(cls)
        for candidate in (plain, *_narrow(plain)):
            varies = isinstance(candidate, Sparsifier) and candidate.count(_LENGTH) is None
            kind = candidate.message, *fitting(candidate), varies, getattr(candidate, "wire", None)
            found.setdefault(kind, candidate)
    return list(found.values())


def pairs(compressors: Iterable[Compressor] | None = None) -> list[tuple[Compressor, str]]:
    """Return every compressor, by default one of each kind, with every collective that carries its messages."""
    chosen = representatives() if compressors is None else compressors
    return [(compressor, name) for compressor in chosen for name in fitting(compressor)]


def _narrow(compressor: Compressor) -> list[Compressor]:
    found = []
    for wire in ("bf16", "q4"):
        with contextlib.suppress(ConfigurationError):
            found.append(get_compressor(compressor.get_config() | {"wire": wire}))
    return found


def accumulated(array: Array, residual: Array | None = None) -> Accumulated:
    """Wrap an array as the input of `Sparsifier.select`.

    Parameters
    ----------
    array : array, shape (n,)
        The gradient: float32 or float64.
    residual : array, shape (n,), optional
        The residual.
    """
    return Accumulated(np.full(array.size + TRAILER, np.nan, array.dtype), residual, [Piece(0, array)])


def mean_of(result: Result, array: Array) -> Array:
    """Return the mean of an exchange of arrays like ``array``, written first if messages hold it."""
    if not callable(result.mean):
        return result.mean
    mean = np.empty_like(array)
    result.mean(mean)
    return mean


def awkward() -> dict[str, Array]:
    """Return arrays that are hard for compressors, by name, in float64; float32 holds them all."""
    rng = np.random.default_rng(0)
    bad = rng.normal(size=3000)
    bad[[5, 50, 500]] = (np.nan, np.inf, -np.inf)
    return {
        "zeros": np.zeros(3000),
        "negative zeros": np.full(3000, -0.0),
        "equal": np.full(3000, -2.5),
        "two values": np.where(np.arange(3000) % 3 == 0, 1.0, -2.0),
        "denormal": np.full(3000, 1e-42),
        "huge": np.where(np.arange(3000) % 2 == 0, 3e38, -3e38),
        "one large": np.where(np.arange(3000) == 17, 1e38, 1e-38),
        "nearly all zero": np.where(np.arange(3000) % 997 == 3, 1.0, 0.0),
        "one element": np.array([5.0]),
        "one zero": np.array([0.0]),
        "ties": np.array([0.0, 1.0, 0.0, -1.0, 1.0]),
        "not finite": bad,
        "only NaN": np.full(3000, np.nan),
    }


def norm2(array: Array) -> float:
    """Return the squared L2 norm, in float64."""
    return float(np.square(array, dtype=np.float64).sum())


def make_reducers(
    compressor: Compressor | None, collective: str, ranks: int, **settings: Any
) -> tuple[list[Reducer], LocalWorld]:
    """Return a reducer for each rank, by default without a warm-up, and their world."""
    world = LocalWorld(ranks)
    policy = with_warmup(settings.pop("policy", None), settings.pop("warmup", 0))
    return [Reducer(compressor, collective, policy, comm=end, **settings) for end in world.transports], world


def reduce_one(world: LocalWorld, reducers: list[Reducer], gradients: list[Array]) -> list[Array]:
    """Reduce one array a rank, as a matrix, since some compressors depend on the shape."""
    numel = gradients[0].size
    rows = max(rows for rows in range(1, math.isqrt(numel) + 1) if numel % rows == 0)
    shape = rows, numel // rows
    exchanges = [
        reducer.rounds({"w": gradient.reshape(shape)}) for reducer, gradient in zip(reducers, gradients, strict=True)
    ]
    return [means["w"].flatten() for means in world.run(exchanges)]
