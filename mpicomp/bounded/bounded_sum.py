"""Sums of arrays within an error bound: integers on a grid that all ranks share, packed, added and packed again.

Let ``e`` be the bound of the mean, or that of the sum divided by the ranks. The step of the grid is ``2 e (31/32)``.

1. A rank rounds ``x`` to ``q * step``, so that ``|x - q * step| <= (31/32) e + 2**-52 |x|``.
2. Sums of integers are exact, in whatever order they are taken.
3. The result is one product in float64 and one rounding to the array's dtype, which take away at most ``u + 2**-52``
   of its magnitude; ``u`` is 2**-24 for float32 and 2**-53 for float64. A rank's share is ``(u + 2**-52)(|x| + e)``.
4. Integers stand for blocks up to ``2**18 e`` (float32) or ``2**44 e`` (float64). There the terms of 1 and 3 that grow
   with ``|x|`` are less than ``e / 32``.
5. So each rank adds less than ``e`` to the error of the sum, and the mean is within ``e``.

A block with a larger number is sent uncoded, and its sum over the ranks is exact until it is rounded. Then 5 holds up
to ``2**23 e`` and ``2**50 e``; beyond, the dtype has no closer numbers, and the last rounding can add one spacing of
them to ``e``.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.scheme import check_counts
from mpicomp.errors import MessageError
from mpicomp.mpi.rounds import Group, Round, Rounds, gather_rows, parts_of

_WORD = np.dtype(np.uint64)
_NAME = "allreduce with a bound"
_DAMAGED = -1  # in place of the length of a sum: its owner could not parse a message
_USED = 31 / 32  # share of the bound for the rounding to the grid
_REACH = {4: 2.0**18, 8: 2.0**44}  # largest numbers that become integers, over e, by the bytes of an element
_SPARE_BITS = 5  # of integers that hold sums: a sign, differences of differences, and signs folded in


class Grid(NamedTuple):
    """The grid of an array: its step, the largest magnitude that is rounded to it, and the divisor of a sum."""

    step: float
    limit: float
    divisor: int


def grid_of(error: float, op: str, dtype: np.dtype[np.floating], ranks: int) -> Grid:
    """Return the grid for a bound.

    >>> grid_of(0.016, "mean", np.dtype(np.float32), 4).step, grid_of(0.016, "sum", np.dtype(np.float32), 4).step
    (0.031, 0.00775)
    """
    share = error if op == "mean" else error / ranks
    step = 2 * _USED * share
    # The last two keep sums within their integers and the results finite.
    most = 2.0 ** (8 * dtype.itemsize - _SPARE_BITS) * step / ranks, float(np.finfo(dtype).max) / (4 * ranks)
    return Grid(step, min(_REACH[dtype.itemsize] * share, *most), ranks if op == "mean" else 1)


def bounded_sum(array: NDArray[np.floating], out: NDArray[np.floating], grid: Grid, group: Group) -> Rounds[None]:
    """Write the ranks' sum of contiguous arrays, or their mean, to ``out``, which may be the array. As rounds.

    Each rank owns a part: it is sent all other ranks' integers of it, and sends their sum to all.
    """
    from mpicomp.kernels.cpu import bounded_blocks as kernels  # which loads Numba, as no import does

    if group.size == 1:
        out[:] = array
        return
    rank, itemsize, dtype = group.rank, array.itemsize, array.dtype
    blocks = accumulate(parts_of(-(-array.size // kernels.BLOCK), group.size), initial=0)
    parts = [slice(*pair) for pair in pairwise(min(kernels.BLOCK * block, array.size) for block in blocks)]
    counts = [part.stop - part.start for part in parts]
    most = [kernels.bounded_words(count, itemsize) for count in counts]

    packed, lengths = np.empty(sum(most), _WORD), list[int]()
    for part in parts:
        lengths.append(kernels.pack_bounded(array[part], grid.step, grid.limit, packed[sum(lengths) :]))
    table = yield from gather_rows(np.array(lengths, np.int64), group)
    for owner, length in enumerate(lengths):
        check_counts(_NAME, table[:, owner], 0, most[owner], (rank, length))
    arriving = table[:, rank].tolist()
    received = np.empty(sum(arriving), _WORD)
    send = packed[: sum(lengths)]
    yield Round("alltoallv", lengths, _WORD, send=send, recv=received, received=arriving)

    starts = np.concatenate(([0], np.cumsum(arriving)))
    problem = _unreadable(received, starts, [counts[rank]] * group.size, itemsize)
    length, total = _DAMAGED, np.empty(most[rank], _WORD)
    if problem is None:
        length = kernels.add_bounded(received, starts, counts[rank], grid.step, grid.divisor, total.view(dtype))
    lengths = (yield from gather_rows(np.int64(length), group)).tolist()
    if _DAMAGED in lengths:
        raise MessageError(f"{_NAME}: some rank was sent a damaged message") from problem
    check_counts(_NAME, lengths, 0, max(most), (rank, length))
    received = np.empty(sum(lengths), _WORD)
    yield Round("allgatherv", lengths, _WORD, send=total[:length], recv=received)

    starts = np.concatenate(([0], np.cumsum(lengths)))
    problem = _unreadable(received, starts, counts, itemsize)
    if problem is not None:
        raise problem
    for part, (start, stop) in zip(parts, pairwise(starts), strict=True):
        kernels.unpack_bounded(received[start:stop], grid.step / grid.divisor, out[part])


def _unreadable(
    messages: NDArray[np.uint64], starts: NDArray[np.int64], counts: list[int], itemsize: int
) -> MessageError | None:
    from mpicomp.kernels.cpu.bounded_blocks import check_bounded

    for rank, (count, (start, stop)) in enumerate(zip(counts, pairwise(starts), strict=True)):
        if not check_bounded(messages[start:stop], count, itemsize):
            return MessageError(
                f"{_NAME}: from rank {rank}: the blocks of a message of {stop - start} words are not those of "
                f"{count} elements"
            )
    return None
