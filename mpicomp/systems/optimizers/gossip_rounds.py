"""PowerGossip: ranks average their models with those of their neighbours, by products with a few vectors."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.algorithms.matrix_batches import Matrix, multiply, orthogonalize, stacked
from mpicomp.errors import NonFiniteError
from mpicomp.rounds import Graph, Round, Rounds
from mpicomp.workspace import Workspace

_FARTHEST = 2.0**-20  # times the largest number: models further apart are reported, since steps between may overflow


class Gossip:
    """Gossip of one rank with its neighbours: they average their models along vectors that a power iteration finds.

    Two neighbours have the same orthonormal vectors ``P`` for every matrix ``X``. They exchange ``X' P`` and so know
    ``D = (A - B)' P`` of the lower rank's ``A`` and the other's ``B``. Both take ``w P D'`` over, the lower one with a
    minus: the part of their difference that the vectors see becomes smaller, and the sum over ranks stays what it was.
    ``D``, made orthonormal, are their vectors for the other side of the matrix at the next turn, and so on: a power
    iteration on the difference of the two models.

    Parameters
    ----------
    graph : Graph
        Pairs of neighbours; weights ``w`` are those of the graph, times ``rate``.
    place : int
        This rank's place in the graph.
    shapes : sequence of tuple of int
        Of the arrays that follow each other in the flat model. One with several dimensions is the matrix of its first
        against all others, unless its factors are no smaller; everything else is averaged as it is.
    dtype : numpy.dtype
        float32 or float64: of the model.
    rank : int
        Number of vectors of a matrix, at most its smaller side.
    rate : float
        In (0, 1].
    seed : int
        Seed of the first vectors, the same on all ranks.

    Attributes
    ----------
    turn : int
        Number of exchanges so far. Even ones begin with vectors for the rows.
    probes : list of array, shape (neighbours, matrices, side, rank)
        The vectors of each neighbour and stack of matrices, for the next turn.
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
        self.turn = 0
        drawn = self._draw(sum(stack.count * stack.first.rows * stack.first.rank for stack in self._stacks))
        self.probes = [orthogonalize(part) for part in self._cut(drawn, rows=True)]

    def rounds(self, model: NDArray[np.floating]) -> Rounds[None]:
        """Exchange once with all neighbours and move the model towards theirs, in place. Collective, as a round.

        Parameters
        ----------
        model : array, shape (numel,)
            All arrays, one after the other.

        Raises
        ------
        NonFiniteError
            Where this rank's or a neighbour's model holds NaN or infinity, on both; the model is left as it is.
        """
        if not self._neighbours:
            return
        rows = self.turn % 2 == 0
        neighbours, length = len(self._neighbours), self._length(not rows)
        mine, theirs, difference = (
            self._workspace.array(name, neighbours * length, self._dtype).reshape(neighbours, length)
            for name in ("mine", "theirs", "difference")
        )
        # 1. Project this rank's matrices on the vectors that it shares with each neighbour.
        matrices = [stack.of(model) for stack in self._stacks]
        wide = [_side_by_side(probe) for probe in self.probes]
        for matrix, probe, answer in zip(matrices, wide, self._cut(mine, not rows), strict=True):
            seen = np.empty((*matrix.shape[:1], answer.shape[2], probe.shape[2]), self._dtype)
            multiply(matrix.transpose(0, 2, 1) if rows else matrix, probe, seen)
            answer[:] = _one_by_one(seen, neighbours)
        place = length - self._plain
        for start, stop in self._gaps:
            mine[:, place : place + stop - start] = model[start:stop]
            place += stop - start

        # 2. Exchange projections with all neighbours.
        yield Round(
            "neighbor_alltoall",
            (length,),
            self._dtype,
            send=mine.reshape(-1),
            recv=theirs.reshape(-1),
            graph=self._graph,
        )

        # 3. Subtract: what two models differ by along these vectors.
        limit = np.finfo(self._dtype).max * _FARTHEST
        for number, other in enumerate(self._neighbours):
            # The lower rank's first on both, so that both have the same bits, signs of zeros among them.
            low, high = (mine, theirs) if self._place < other else (theirs, mine)
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(low[number], high[number], out=difference[number])
            if not (np.abs(difference[number]) < limit).all():
                raise NonFiniteError(
                    f"gossip: the model of rank {self._place} or that of its neighbour {other} holds NaN or infinity, "
                    "or they are that far apart; nothing was taken over"
                )
        # 4. Move the model towards each neighbour's by its share of that difference.
        answers = self._cut(difference, not rows)
        change = self._workspace.array("change", self._numel, self._dtype)
        shares = np.array(self._shares, self._dtype)
        for stack, probe, answer in zip(self._stacks, wide, answers, strict=True):
            taken = _side_by_side(answer * shares[:, None, None, None])
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
        """Return the state that has to survive a restart, on this rank."""
        return {"turn": self.turn, "probes": list(self.probes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore the state that `state_dict` returned, on all ranks alike; return whether it fits.

        It is not taken up where it is of another model or of another number of neighbours.
        """
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
        """Number of elements that are averaged as they are."""
        return sum(stop - start for start, stop in self._gaps)

    def _length(self, rows: bool) -> int:
        """Return the length of a message that answers for all rows, or for all columns."""
        sides = [stack.first.rows if rows else stack.first.columns for stack in self._stacks]
        factors = sum(stack.count * side * stack.first.rank for stack, side in zip(self._stacks, sides, strict=True))
        return factors + self._plain

    def _cut(self, messages: NDArray[np.floating], rows: bool) -> list[NDArray[np.floating]]:
        """Return each stack's part of all messages, shape (neighbours, matrices, side, rank); views."""
        parts, place = [], 0
        for stack in self._stacks:
            shape = (stack.count, stack.first.rows if rows else stack.first.columns, stack.first.rank)
            parts.append(messages[:, place : place + prod(shape)].reshape(len(messages), *shape))
            place += prod(shape)
        return parts

    def _draw(self, length: int) -> NDArray[np.floating]:
        """Return random numbers for each neighbour, the same on both sides of an edge."""
        edges = [sorted((self._place, other)) for other in self._neighbours]
        rows = [np.random.default_rng([self._seed, self.turn, *edge]).standard_normal(length) for edge in edges]
        return np.array(rows, self._dtype).reshape(len(edges), length)

    def _fill_empty(self, answers: NDArray[np.floating]) -> None:
        """Put random numbers where two models do not differ along a vector: from zeros no iteration goes on."""
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


def _side_by_side(parts: NDArray[np.floating]) -> NDArray[np.floating]:
    """Turn (neighbours, matrices, side, rank) into (matrices, side, neighbours x rank): one product serves all."""
    neighbours, matrices, side, rank = parts.shape
    return parts.transpose(1, 2, 0, 3).reshape(matrices, side, neighbours * rank)


def _one_by_one(wide: NDArray[np.floating], neighbours: int) -> NDArray[np.floating]:
    """Undo `_side_by_side`."""
    matrices, side, columns = wide.shape
    return wide.reshape(matrices, side, neighbours, columns // neighbours).transpose(2, 0, 1, 3)
