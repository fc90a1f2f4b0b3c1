"""PowerGossip on flat arrays: ranks average models with those of their neighbors, by products with a few vectors."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.algorithms.matrix_batches import Matrix, multiply, orthogonalize, stacked
from mpicomp.errors import NonFiniteError
from mpicomp.rounds import Graph, Round, Rounds
from mpicomp.workspace import Workspace

_MAX_DIFFERENCE = 2.0**-20  # of models, times the largest number: with larger ones intermediate values may overflow


class Gossip:
    """Gossip of one rank with its neighbors: they average their models along vectors that a power iteration finds.

    Two neighbors have the same orthonormal vectors ``P`` for every matrix ``X``. They exchange ``X' P`` and so know
    ``D = (A - B)' P`` of the lower rank's ``A`` and the other's ``B``. Both add ``w P D'``, the lower one with a minus:
    the part of their difference along the vectors becomes smaller, and the sum over ranks stays the same. ``D``, made
    orthonormal, has their vectors for the other side of the matrix at the next turn: a power iteration on the
    difference of the two models. Weights ``w`` are those of the graph, times ``rate``.

    ``shapes`` are those of the arrays that follow each other in the flat model. One with several dimensions is the
    matrix of its first against all others, with at most ``rank`` vectors, unless its factors are no smaller; all others
    are averaged as they are. ``place`` is this rank's place in the graph. The ``seed`` of the first vectors is the same
    on all ranks.
    """

    def __init__(
        self,
        graph: Graph,
        place: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype[Any],
        rank: int = 1,
        rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._graph = graph
        self._place = place
        self._neighbours = graph.neighbours(place)
        self._dtype = dtype
        self._seed = seed
        self._numel = sum(map(prod, shapes))
        matrices = _matrices_of(shapes, rank)
        self._stacks = stacked(matrices, self._numel)
        bounds = [0, *(bound for matrix in matrices for bound in (matrix.start, matrix.stop)), self._numel]
        self._gaps = list(zip(bounds[::2], bounds[1::2], strict=True))
        weights = [rate * graph.weight(place, other) for other in self._neighbours]
        self._shares = [
            weight if place < other else -weight for weight, other in zip(weights, self._neighbours, strict=True)
        ]
        self._workspace = Workspace()
        self.turn = 0  # number of exchanges so far; even ones begin with vectors for the rows
        drawn = self._draw(sum(stack.count * stack.first.rows * stack.first.rank for stack in self._stacks))
        # The vectors of each stack of matrices for the next turn, shape (neighbors, matrices, side, rank)
        self.probes = [orthogonalize(part) for part in self._cut(drawn, rows=True)]

    def rounds(self, model: NDArray[np.floating]) -> Rounds[None]:
        """Exchange once with all neighbors and move the flat model towards theirs, in place. Collective, as a round."""
        if not self._neighbours:
            return
        rows = self.turn % 2 == 0
        neighbours, length = len(self._neighbours), self._length(not rows)
        mine, theirs, difference = (
            self._workspace.array(name, neighbours * length, self._dtype).reshape(neighbours, length)
            for name in ("mine", "theirs", "difference")
        )
        # 1. Project this rank's matrices on the vectors that it shares with each neighbor.
        matrices = [stack.of(model) for stack in self._stacks]
        wide = [_widen(probe) for probe in self.probes]
        for matrix, probe, answer in zip(matrices, wide, self._cut(mine, not rows), strict=True):
            seen = np.empty((*matrix.shape[:1], answer.shape[2], probe.shape[2]), self._dtype)
            multiply(matrix.transpose(0, 2, 1) if rows else matrix, probe, seen)
            answer[:] = _split(seen, neighbours)
        place = length - self._plain
        for start, stop in self._gaps:
            mine[:, place : place + stop - start] = model[start:stop]
            place += stop - start

        # 2. Exchange projections with all neighbors.
        send, recv = mine.reshape(-1), theirs.reshape(-1)
        yield Round("neighbor_alltoall", (length,), self._dtype, send=send, recv=recv, graph=self._graph)

        # 3. Subtract: the difference of two models along these vectors.
        limit = np.finfo(self._dtype).max * _MAX_DIFFERENCE
        for number, other in enumerate(self._neighbours):
            # The lower rank's first on both ranks, so that both have the same bits, the signs of zeros included.
            low, high = (mine, theirs) if self._place < other else (theirs, mine)
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(low[number], high[number], out=difference[number])
            if not (np.abs(difference[number]) < limit).all():
                raise NonFiniteError(
                    f"gossip: the model of rank {self._place} or that of its neighbor {other} holds NaN or infinity, "
                    "or their difference overflows; no model was changed"
                )
        # 4. Move the model towards each neighbor's by its share of that difference.
        answers = self._cut(difference, not rows)
        change = self._workspace.array("change", self._numel, self._dtype)
        shares = np.array(self._shares, self._dtype)
        for stack, probe, answer in zip(self._stacks, wide, answers, strict=True):
            taken = _widen(answer * shares[:, None, None, None])
            left, right = (probe, taken) if rows else (taken, probe)
            multiply(left, right.transpose(0, 2, 1), stack.of(change))
        place = length - self._plain
        for start, stop in self._gaps:
            np.matmul(shares, difference[:, place : place + stop - start], out=change[start:stop])
            place += stop - start
        model -= change
        # 5. The differences, made orthonormal, are the vectors of the next exchange: a power iteration.
        self.turn += 1
        self._fill_empty(difference[:, : length - self._plain])
        self.probes = [orthogonalize(answer) for answer in answers]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a restart."""
        return {"turn": self.turn, "probes": list(self.probes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a result of `state_dict` if its shapes and number of neighbors fit; return whether they do."""
        rows = state["turn"] % 2 == 0
        sizes = [(s.count, s.first.rows if rows else s.first.columns, s.first.rank) for s in self._stacks]
        shapes = [(len(self._neighbours), *size) for size in sizes]
        if [probe.shape for probe in state["probes"]] != shapes:
            return False
        self.turn = int(state["turn"])
        self.probes = [np.array(probe, self._dtype) for probe in state["probes"]]
        return True

    @property
    def _plain(self) -> int:
        """Elements that are averaged as they are."""
        return sum(stop - start for start, stop in self._gaps)

    def _length(self, rows: bool) -> int:
        """Return the length of a message with projections for all rows, or for all columns."""
        sides = [stack.first.rows if rows else stack.first.columns for stack in self._stacks]
        factors = sum(stack.count * side * stack.first.rank for stack, side in zip(self._stacks, sides, strict=True))
        return factors + self._plain

    def _cut(self, messages: NDArray[np.floating], rows: bool) -> list[NDArray[np.floating]]:
        """Return views of each stack's part of all messages, shape (neighbors, matrices, side, rank)."""
        parts, place = [], 0
        for stack in self._stacks:
            shape = (stack.count, stack.first.rows if rows else stack.first.columns, stack.first.rank)
            parts.append(messages[:, place : place + prod(shape)].reshape(len(messages), *shape))
            place += prod(shape)
        return parts

    def _draw(self, length: int) -> NDArray[np.floating]:
        """Return random numbers for each neighbor, the same on both ranks of an edge."""
        edges = [sorted((self._place, other)) for other in self._neighbours]
        rows = [np.random.default_rng([self._seed, self.turn, *edge]).standard_normal(length) for edge in edges]
        return np.array(rows, self._dtype).reshape(len(edges), length)

    def _fill_empty(self, answers: NDArray[np.floating]) -> None:
        """Write random numbers where two models do not differ along a vector: an iteration stays at zeros."""
        rows = self.turn % 2 == 0
        parts = self._cut(answers, rows)
        empty = [np.broadcast_to((part == 0).all(axis=2, keepdims=True), part.shape) for part in parts]
        if any(where.any() for where in empty):
            drawn = self._cut(self._draw(answers.shape[1]), rows)
            for part, values, where in zip(parts, drawn, empty, strict=True):
                part[where] = values[where]


def _matrices_of(shapes: Sequence[tuple[int, ...]], rank: int) -> list[Matrix]:
    """Return the matrices that travel as factors, of at most ``rank`` vectors."""
    found: list[Matrix] = []
    start = 0
    for shape in shapes:
        size: int = prod(shape)
        if len(shape) > 1 and size:
            rows, columns = shape[0], prod(shape[1:])
            vectors = min(rank, rows, columns)
            if vectors * (rows + columns) < size:
                found.append(Matrix(start, rows, columns, vectors))
        start += size
    return found


def _widen(parts: NDArray[np.floating]) -> NDArray[np.floating]:
    """Turn (neighbors, matrices, side, rank) into (matrices, side, neighbors x rank), for one product."""
    neighbours, matrices, side, rank = parts.shape
    return parts.transpose(1, 2, 0, 3).reshape(matrices, side, neighbours * rank)


def _split(wide: NDArray[np.floating], neighbours: int) -> NDArray[np.floating]:
    """Undo `_widen`."""
    matrices, side, columns = wide.shape
    return wide.reshape(matrices, side, neighbours, columns // neighbours).transpose(2, 0, 1, 3)
