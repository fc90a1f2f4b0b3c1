"""Graphs of the ranks that communicate with each other."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpicomp.errors import ConfigurationError, UnknownNameError

KNOWN = ("ring", "torus")


@dataclass(frozen=True)
class Graph:
    """A connected graph of ranks; of the two ranks of an edge the lower one comes first.

    >>> graph = make_graph([(0, 1), (1, 2), (1, 3)], 4)
    >>> graph.neighbours(1), graph.neighbours(3)
    ((0, 2, 3), (1,))
    >>> graph.weight(1, 3)
    0.25
    """

    size: int
    edges: frozenset[tuple[int, int]]

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return a rank's neighbours, ascending."""
        return self._adjacent[rank]

    @property
    def most(self) -> int:
        """Largest number of neighbours of any rank."""
        return max(map(len, self._adjacent))

    def weight(self, rank: int, other: int) -> float:
        """Return the Metropolis weight of two neighbours, with which averages converge to that of all ranks."""
        return 1 / (1 + max(len(self.neighbours(rank)), len(self.neighbours(other))))

    @cached_property
    def _adjacent(self) -> list[tuple[int, ...]]:
        adjacent: list[list[int]] = [[] for _ in range(self.size)]
        for low, high in self.edges:
            adjacent[low].append(high)
            adjacent[high].append(low)
        return [tuple(sorted(others)) for others in adjacent]


def make_graph(edges: str | Iterable[Any], size: int) -> Graph:
    """Make a graph of ranks: a ring, a torus with sides as equal as divisors allow, or of pairs of neighbours.

    >>> sorted(make_graph("ring", 4).edges)
    [(0, 1), (0, 3), (1, 2), (2, 3)]
    >>> make_graph("torus", 12).neighbours(0)
    (1, 3, 4, 8)
    >>> make_graph("torus", 2).edges
    frozenset({(0, 1)})
    """
    if isinstance(edges, str):
        if edges not in KNOWN:
            raise UnknownNameError("graph", edges, KNOWN)
        rows = 1
        if edges == "torus":
            rows = max(side for side in range(1, math.isqrt(size) + 1) if size % side == 0)
        pairs = _torus(rows, size // rows)
    else:
        pairs = [_edge(pair, size) for pair in edges]
    graph = Graph(size, frozenset((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]))
    reached, new = {0}, [0]
    while new:
        new = [other for rank in new for other in graph.neighbours(rank) if other not in reached]
        reached.update(new)
    if len(reached) < size:
        missing = min(set(range(size)) - reached)
        raise ConfigurationError(
            f"graph: rank {missing} of {size} cannot be reached from rank 0, so their models would never meet; add an "
            "edge"
        )
    return graph


def _torus(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return every rank's edges to the right and down; a side of one has an edge from a rank to itself."""
    pairs = []
    for row in range(rows):
        for column in range(columns):
            rank = row * columns + column
            pairs.append((rank, row * columns + (column + 1) % columns))
            pairs.append((rank, (row + 1) % rows * columns + column))
    return pairs


def _edge(pair: Any, size: int) -> tuple[int, int]:
    """Return an edge as a pair of ranks, or raise."""
    ranks = list(pair) if isinstance(pair, Iterable) else []
    if len(ranks) != 2 or not all(isinstance(rank, (int, np.integer)) for rank in ranks):
        raise ConfigurationError(f"graph: an edge is a pair of ranks, got {pair!r}")
    first, second = map(int, ranks)
    for rank in (first, second):
        if not 0 <= rank < size:
            raise ConfigurationError(f"graph: there are ranks 0 to {size - 1}, and edge {pair!r} names rank {rank}")
    if first == second:
        raise ConfigurationError(f"graph: an edge joins two ranks, got {pair!r}; leave it out")
    return first, second
