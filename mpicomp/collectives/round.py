"""Rounds: what a scheme asks of the transport, and the group of ranks that it asks it for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Group:
    """Some ranks, as one of them sees them.

    Parameters
    ----------
    rank, size : int
        This rank's place, and how many there are.
    identical_sums : bool
        Whether the transport's sum has the same bits on every rank.
    name : str
        Which ranks: ``"world"`` is all of them.
    """

    rank: int
    size: int
    identical_sums: bool = True
    name: str = "world"


@dataclass
class Round:
    """One communication step; without arrays it is only the shape of one.

    Parameters
    ----------
    operation : {"allreduce", "allgatherv", "alltoallv", "bcast"}
        ``allreduce`` sums ``send`` over ranks into ``recv``.
        ``allgatherv`` puts the ranks' ``send`` one after the other into ``recv``.
        ``alltoallv`` cuts ``send`` in parts, part j for rank j; ``recv`` holds this rank's part from every rank.
        ``bcast`` takes ``send`` from the root and puts it into ``recv`` on all ranks.
    counts : sequence of int
        Elements, known to every rank. ``allreduce`` and ``bcast``: one number. ``allgatherv``: what each rank
        contributes. ``alltoallv``: the length of each part, the same on every rank.
    dtype : numpy.dtype
        Of the elements.
    root : int
        Of a ``bcast``.
    send, recv : arrays, optional
        Contiguous; they do not overlap.
    """

    operation: str
    counts: Sequence[int]
    dtype: np.dtype[Any]
    root: int = 0
    send: NDArray[Any] | None = None
    recv: NDArray[Any] | None = None

    def sent_bytes(self, group: Group) -> int:
        """Bytes of payload that this rank hands to the transport for others."""
        if group.size == 1:
            return 0
        match self.operation:
            case "allgatherv":
                elements = self.counts[group.rank]
            case "alltoallv":
                elements = sum(self.counts) - self.counts[group.rank]
            case "bcast":
                elements = self.counts[0] if group.rank == self.root else 0
            case _:
                elements = self.counts[0]
        return elements * self.dtype.itemsize

    def wire_bytes(self, group: Group) -> float:
        """Bytes that leave this rank.

        An allreduce is counted as a ring or a reduce-scatter with an allgather, which send 2 (N-1)/N of the array; an
        allgather as a ring, in which a rank passes on every part but its right neighbour's. A broadcast
        is counted as what arrives, shared evenly: (N-1)/N of the array.
        """
        size = group.size
        match self.operation:
            case "allgatherv":
                elements: float = sum(self.counts) - self.counts[(group.rank + 1) % size]
            case "alltoallv":
                elements = sum(self.counts) - self.counts[group.rank]
            case "bcast":
                elements = self.counts[0] * (size - 1) / size
            case _:
                elements = 2 * self.counts[0] * (size - 1) / size
        return elements * self.dtype.itemsize if size > 1 else 0.0


def dense_ring_bytes(numel: int, ranks: int, itemsize: int = 4) -> float:
    """Bytes that leave a rank when a dense array is averaged by a ring: the yardstick for all others.

    Examples
    --------
    >>> dense_ring_bytes(1000, 4)
    6000.0
    """
    return 2 * (ranks - 1) / ranks * numel * itemsize


def parts_of(numel: int, size: int) -> list[int]:
    """Cut ``numel`` elements into ``size`` parts that differ by at most one element.

    Examples
    --------
    >>> parts_of(10, 4), parts_of(1, 3)
    ([3, 3, 2, 2], [1, 0, 0])
    """
    least, more = divmod(numel, size)
    return [least + (rank < more) for rank in range(size)]
