"""Random positions, the same on all ranks, so that no index travels."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import SharedSparsifier
from mpicomp.registry import register

_CHUNK_STRATA = 1 << 16  # strata that are drawn at once, in the cache


@register
@dataclass(frozen=True, repr=False)
class RandomK(SharedSparsifier):
    """Random-k: one element at random of each of k parts of nearly equal length.

    ::

        i = np.sort(rng(seed, step, bucket).choice(x.size, k, replace=False))  # the same on all ranks
        sent[i] = x[i]

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    wire
        See `SharedSparsifier`.

    Notes
    -----
    Different from the usual random-k: one position of each of k parts in place of a permutation.
    """

    id: ClassVar[str] = "randomk"
    paper: ClassVar[str] = (
        "random-k with a seed that ranks share, see Eghlidi and Jaggi 2020, arXiv 2009.09271; one position of each of "
        "k parts in place of a permutation"
    )

    ratio: float = 0.01

    def positions(self, numel: int, context: Context, out: NDArray[np.uint32]) -> None:
        k, random = out.size, context.random(shared=True)
        draws = context.workspace.host_array("randomk.draws", min(k, _CHUNK_STRATA), np.float64)
        for first in range(0, k, _CHUNK_STRATA):
            bounds = np.arange(first, min(first + _CHUNK_STRATA, k) + 1, dtype=np.uint64)
            bounds *= np.uint64(numel)  # below 2**64, since numel and k are below 2**32
            bounds //= np.uint64(k)
            offsets = draws[: bounds.size - 1]
            random.random(out=offsets)
            offsets *= np.diff(bounds)
            np.floor(offsets, out=offsets)
            offsets += bounds[:-1]
            out[first : first + offsets.size] = offsets


@register
@dataclass(frozen=True, repr=False)
class GlobalRandKMaxNorm(RandomK):
    """GlobalRandK-MaxNorm (arXiv 2109.12497): `RandomK` with values in 8 bits.

    Parameters
    ----------
    ratio, wire
        See `RandomK`.

    Notes
    -----
    Different from the paper and its code: error feedback; positions of each step drawn on their own in place of a
    stored permutation; each rank has a grid of its own; and in the code each rank keeps its gradient where nothing is
    selected, so that models of different ranks diverge.
    """

    id: ClassVar[str] = "globalrandk-maxnorm"
    paper: ClassVar[str] = (
        "GlobalRandK-MaxNorm, arXiv 2109.12497; random-k in place of a stored permutation, elements that are not sent "
        "are zero on all ranks, error feedback"
    )

    ratio: float = 0.1
    wire: str | None = field(default="q8", kw_only=True)


@register
@dataclass(frozen=True, repr=False)
class BlockRandomK(SharedSparsifier):
    """Block random-k (arXiv 2009.09271): k neighbours from a random element on; the first follows the last.

    ::

        start = rng(seed, step, bucket).integers(x.size)  # the same on all ranks
        i = np.sort((start + np.arange(k)) % x.size)
        sent[i] = x[i]

    Parameters
    ----------
    ratio, wire
        See `RandomK`.

    Notes
    -----
    Different from published code: one block for a bucket, not one for each of its arrays.
    """

    id: ClassVar[str] = "blockrandomk"
    paper: ClassVar[str] = "random-block sparsification, Eghlidi and Jaggi 2020, arXiv 2009.09271; one block a bucket"

    ratio: float = 0.01

    def positions(self, numel: int, context: Context, out: NDArray[np.uint32]) -> None:
        start = int(context.random(shared=True).integers(numel))
        wrapped = max(0, start + out.size - numel)
        out[:wrapped] = np.arange(wrapped, dtype=np.uint32)
        out[wrapped:] = np.arange(start, start + out.size - wrapped, dtype=np.uint32)
