"""How Flexible Communication chooses a collective: costs of Table I, and the inequalities (5a to 5c) that compare them.

Equations 4a and 4b are AR-Topk: a broadcast of one rank's indices and a sum of the values at them.
"""

import math

from mpicomp.cost.formulas import Terms, allgather, broadcast, ring, tree


def sparse_sum(kind: str, ranks: int, nbytes: float) -> Terms:
    """Return the cost of averaging a selection by one of `SPARSE_SUMS`, as Flexible Communication counts it.

    Parameters
    ----------
    kind : str
        ``"allgather"`` of values and indices; ``"ring"`` or ``"tree"`` for a broadcast of one rank's indices and a sum
        of the values at them (AR-Topk, equations 4a and 4b).
    ranks : int
        Number of ranks.
    nbytes : float
        Bytes of the values that a rank keeps; its indices take the same.
    """
    if kind == "allgather":
        return allgather(ranks, 2 * nbytes)
    return broadcast(ranks, nbytes) + {"ring": ring, "tree": tree}[kind](ranks, nbytes)


SPARSE_SUMS = ("allgather", "ring", "tree")
"""Algorithms among which `published_choice` chooses."""


def published_choice(ranks: int, nbytes: float, latency: float, seconds_per_byte: float) -> str:
    """Return the one of `SPARSE_SUMS` that Flexible Communication's inequalities (5a to 5c) name.

    Both sides are multiplied so that none divides by zero. With two ranks the allgather is never slower.

    Parameters
    ----------
    ranks, nbytes
        See `sparse_sum`.
    latency, seconds_per_byte : float
        Speed of the link.

    Examples
    --------
    >>> kept = 4 * 25_557_032 * 0.1  # ResNet50
    >>> published_choice(8, kept, latency=1e-3, seconds_per_byte=8e-9)
    'ring'
    >>> published_choice(8, kept / 100, latency=1e-3, seconds_per_byte=8e-9)
    'allgather'
    """
    if ranks == 1:
        return "allgather"
    depth, latency_bytes = math.log2(ranks), latency / seconds_per_byte
    if ring_beats_tree(ranks, nbytes, latency, seconds_per_byte):
        return "ring" if latency_bytes < (1 - 1 / ranks - depth / (2 * (ranks - 1))) * nbytes else "allgather"
    return "tree" if latency_bytes < ((ranks - 1) / depth - 1.5) * nbytes else "allgather"


def ring_beats_tree(ranks: int, nbytes: float, latency: float, seconds_per_byte: float) -> bool:
    """Return whether inequality 5a names a ring for the sum; see `published_choice`."""
    depth = math.log2(ranks)
    return latency / seconds_per_byte * (ranks - 1 - depth) < (depth - (ranks - 1) / ranks) * nbytes
