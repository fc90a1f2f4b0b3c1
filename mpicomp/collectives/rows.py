"""Means of the rows of sparse arrays."""

import numpy as np
from numpy.typing import NDArray

from mpicomp.rounds import Group, Round, Rounds, gather_rows

_INDEX = np.dtype(np.int64)
_NONE = -1  # sent by a rank without a gradient in place of the number of its rows


def mean_of_rows(
    indices: NDArray[np.int64] | None, rows: NDArray[np.floating], group: Group
) -> Rounds[tuple[NDArray[np.int64], NDArray[np.floating]] | None]:
    """Average rows over all ranks, a rank's missing rows being zeros. The same bits on every rank; as rounds.

    ``indices`` ascend, None stands for no gradient. Return (indices, means), or None if no rank has a gradient.
    """
    width = rows.shape[1]
    lengths = yield from gather_rows(np.array(_NONE if indices is None else indices.size, _INDEX), group)
    if (lengths == _NONE).all():
        return None
    counts = [max(0, int(length)) for length in lengths]
    send = np.empty(0, _INDEX) if indices is None else np.ascontiguousarray(indices)
    everyones = yield Round("allgatherv", counts, _INDEX, send=send, recv=np.empty(sum(counts), _INDEX))
    task = Round(
        "allgatherv",
        [count * width for count in counts],
        rows.dtype,
        send=np.ascontiguousarray(rows).reshape(-1),
        recv=np.empty(sum(counts) * width, rows.dtype),
    )
    values = (yield task).reshape(-1, width)
    which: NDArray[np.int64] = np.unique(everyones)
    total = np.zeros((which.size, width), rows.dtype)
    start = 0
    for count in counts:  # in rank order, so that all ranks round alike
        part = slice(start, start + count)
        with np.errstate(over="ignore", invalid="ignore"):  # who asks looks at the mean
            total[np.searchsorted(which, everyones[part])] += values[part]
        start += count
    total /= group.size
    return which, total
