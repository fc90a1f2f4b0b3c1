"""Regions of an array, one a rank, that hold about as many selected elements each."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mpicomp.device import pick
from mpicomp.rounds import parts_of


def even_bounds(numel: int, size: int) -> list[int]:
    """Return the starts of regions of equal length, and the end of the last one.

    Examples
    --------
    >>> even_bounds(10, 4)
    [0, 3, 6, 8, 10]
    """
    return [0, *accumulate(parts_of(numel, size))]


def quantiles(indices: NDArray[np.uint32], size: int) -> list[int]:
    """Return where a rank would cut between ``size`` regions: -1 everywhere if it has selected nothing.

    Parameters
    ----------
    indices : array of uint32
        Positions that it has selected; ascending.
    size : int
        Number of regions.

    Returns
    -------
    list of int
        The first indices of all regions but the first one; they do not descend.

    Examples
    --------
    >>> quantiles(np.array([1, 2, 3, 50], np.uint32), 2), quantiles(np.array([], np.uint32), 3)
    ([3], [-1, -1])
    """
    count = indices.size
    if not count:
        return [-1] * (size - 1)
    found: list[int] = pick(indices, [place * count // size for place in range(1, size)]).tolist()
    return found


def mean_bounds(cuts: NDArray[np.int64], before: Sequence[int]) -> list[int]:
    """Return the boundaries that follow from all ranks' quantiles: their means, rounded down.

    Parameters
    ----------
    cuts : array of int64, shape (ranks, ranks - 1)
        Results of `quantiles` on each.
    before : sequence of int
        The boundaries until now; they stay where no rank has selected anything.

    Examples
    --------
    >>> mean_bounds(np.array([[3], [-1], [6]]), [0, 5, 10])
    [0, 4, 10]
    """
    told = [[int(cut) for cut in own] for own in cuts if -1 not in own]
    if not told:
        return list(before)
    return [before[0], *(sum(column) // len(told) for column in zip(*told, strict=True)), before[-1]]


def overlaps(counts: Sequence[int], targets: Sequence[int], rank: int) -> list[int]:
    """Return the number of a rank's elements that go to each when a list that ranks hold in pieces is cut anew.

    Parameters
    ----------
    counts, targets : sequence of int
        Elements that each rank holds, and is to hold, of the list; with the same sum.
    rank : int
        The rank whose elements are dealt out.

    Examples
    --------
    >>> [overlaps([6, 0, 3], [3, 3, 3], rank) for rank in range(3)]
    [[3, 3, 0], [0, 0, 0], [0, 0, 3]]
    """
    start = sum(counts[:rank])
    stop = start + counts[rank]
    bounds = pairwise([0, *accumulate(targets)])
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in bounds]
