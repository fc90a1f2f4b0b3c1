"""A rank's state from the files of other numbers of ranks, or of ranks with other rows of a model."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import to_host
from mpicomp.checkpoint.file import Leaf, RankFile
from mpicomp.errors import CheckpointError
from mpicomp.rounds import Group

STATES = ("residuals", "velocities")  # keys of a reducer's state whose arrays belong to one rank
Rows = Mapping[str, Sequence[int]]  # first row, end and number of rows of sharded parameters, by name


class Redistribution:
    """What a rank of ``group`` that holds ``rows`` reads of the files of ``written`` ranks; None for a whole model.

    Arrays of sharded parameters are put together by name and row, each from the ranks that held its rows, one in every
    replica. What replicas do not share, `STATES`, is averaged over them by `weights`; the rest is that of one replica.
    """

    def __init__(self, open_file: Callable[[int], RankFile], written: int, rows: Rows | None, group: Group) -> None:
        self._open_file, self._written, self._group, self._rows = open_file, written, group, rows or {}
        self._opened: dict[int, tuple[RankFile, dict[str, Leaf]]] = {}
        held = [] if rows is None else [rows_in(open_file(rank).tree()) for rank in range(written)]
        self._pieces = {name: self._pieces_of(name, length, held) for name, (_, _, length) in self._rows.items()}
        sharing = [ranks for pieces in self._pieces.values() for ranks in pieces.values()] or [list(range(written))]
        self._replica = group.rank * len(sharing[0]) // group.size
        self._same = [
            rank
            for rank in range(written)
            if all(
                (first, end) == tuple(held[rank].get(name, (0, length))[:2])
                for name, (first, end, length) in self._rows.items()
            )
        ]
        if self._same:
            self._nearest = self._same[self._replica * (len(self._same) // len(sharing[0]))]
        else:
            overlapping = [
                ranks
                for name, (first, end, _) in self._rows.items()
                for (low, high), ranks in self._pieces[name].items()
                if low < end and first < high
            ]
            self._nearest = (overlapping or sharing)[0][self._replica]
        self._averaged: set[str] = set()  # places of dicts whose arrays are averaged

    def read(self) -> Any:
        """Return the state."""
        file, _ = self._file(self._nearest)
        tree = file.tree()
        if not self._rows and self._group.size != self._written and rows_in(tree):
            raise CheckpointError(
                f"load_checkpoint: '{file.path.parent}' was written by {self._written} ranks with shards of a model, "
                f"and {self._group.size} load it; pass comm=mpicomp.torch.replicas(model) and "
                "rows=optimizer.state_dict()['mpicomp']['rows']"
            )
        for rank in () if self._rows else weights(self._group.rank, self._group.size, self._written):
            self._file(rank)  # which may be torn, also where nothing is averaged
        self._averaged = {f"{place}[{kind!r}]" for place, _ in reducer_states(tree) for kind in STATES}
        state = self._made(tree, "state")
        if not self._same:
            for _, reducer_state in reducer_states(state):
                reducer_state["memories"] = {}  # what compressors have learned of buckets with other rows
        return state

    def _pieces_of(self, name: str, length: int, held: Sequence[Rows]) -> dict[tuple[int, int], list[int]]:
        """Return the ranks that held the same rows of a parameter, in the order of replicas, by these rows."""
        pieces: dict[tuple[int, int], list[int]] = {}
        for rank, of_rank in enumerate(held):
            first, end, whole = of_rank.get(name, (0, 0, 0)) if of_rank else (0, length, length)
            if whole != length:
                raise CheckpointError(
                    f"load_checkpoint: the checkpoint is of another model: '{name}' has {whole} rows in it, and "
                    f"{length} here; load it into the model that wrote it"
                )
            if first < end:
                pieces.setdefault((first, end), []).append(rank)
        return dict(sorted(pieces.items()))

    def _file(self, rank: int) -> tuple[RankFile, dict[str, Leaf]]:
        """Return a rank's file and the arrays in it by their places."""
        if rank not in self._opened:
            file = self._open_file(rank)
            leaves: dict[str, Leaf] = {}
            file.tree(lambda leaf: leaves.setdefault(leaf.name, leaf))
            self._opened[rank] = file, leaves
        return self._opened[rank]

    def _made(self, node: Any, place: str) -> Any:
        """Return a part of the nearest rank's tree, with this rank's arrays."""
        if isinstance(node, Leaf):
            return self._file(self._nearest)[0].read(node)
        if isinstance(node, list | tuple):
            return type(node)(self._made(inner, f"{place}[{index}]") for index, inner in enumerate(node))
        if not isinstance(node, dict):
            return node
        if place.endswith("['rows']") and rows_in({"rows": node}) and self._rows:
            return {name: list(self._rows[name]) for name in self._rows if name in node}
        made = {}
        held = [name for name, (first, end, _) in self._rows.items() if first < end]
        for name in dict.fromkeys([*node, *held]):
            inside = f"{place}[{name!r}]"
            array = None
            if place in self._averaged or name in self._rows:
                array = self._array(name, inside, place in self._averaged)
            if array is not None:
                made[name] = array
            elif name in node:
                made[name] = self._made(node[name], inside)
        return made

    def _array(self, name: str, place: str, averaged: bool) -> Any:
        """Return this rank's rows of an array by the name of a parameter; None where there is no such array."""
        if name not in self._rows:
            return self._mean(range(self._written), place, averaged)
        parts: list[Any] = []
        first, end, _ = self._rows[name]
        for (low, high), ranks in self._pieces[name].items():
            if (low < end and first < high) or (first == end and not parts):  # without rows a part has the shape
                whole = self._mean(ranks, place, averaged)
                if whole is None or whole.shape[:1] != (high - low,):
                    return None
                parts.append(whole[max(first, low) - low : max(0, min(end, high) - low)])
        if len(parts) < 2:
            return parts[0] if parts else None
        return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else sys.modules["torch"].cat(parts)

    def _mean(self, ranks: Sequence[int], place: str, averaged: bool) -> Any:
        """Return an array of this rank's replica, or the mean of those of the replicas that it continues."""
        shares = weights(self._group.rank, self._group.size, len(ranks)) if averaged else {self._replica: 1.0}
        arrays = []
        for replica in shares:
            file, leaves = self._file(ranks[replica])
            if place not in leaves:
                return None
            arrays.append(file.read(leaves[place]))
        if len(arrays) == 1:
            return arrays[0]
        wide = [to_host(array).astype(np.float64) for array in arrays]
        mean = sum((share * array for share, array in zip(shares.values(), wide, strict=True)), np.zeros_like(wide[0]))
        return _like(arrays[0], mean)


def rows_in(tree: Any) -> dict[str, list[int]]:
    """Return the rows of all sharded parameters that states of optimizers in a tree are of."""
    found: dict[str, list[int]] = {}
    if isinstance(tree, dict):
        rows = tree.get("rows")
        if isinstance(rows, dict) and all(isinstance(held, list) and len(held) == 3 for held in rows.values()):
            found |= rows
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        found |= rows_in(inner)
    return found


def weights(rank: int, ranks: int, written: int) -> dict[int, float]:
    """Return the share of each of the ``written`` ranks' residuals in that of a new rank.

    Old and new ranks share the line from 0 to 1 evenly, and weigh as much as their parts overlap. Shares of a rank sum
    to 1, so that the mean over ranks, which error feedback has still to deliver, stays the same.

    >>> weights(0, 2, 4), weights(3, 4, 2), weights(1, 2, 3)
    ({0: 0.5, 1: 0.5}, {1: 1.0}, {1: 0.3333333333333333, 2: 0.6666666666666666})
    """
    start, stop = rank * written, (rank + 1) * written  # in parts of which each old rank has `ranks`
    return {
        source: (min(stop, (source + 1) * ranks) - max(start, source * ranks)) / written
        for source in range(start // ranks, -(-stop // ranks))
    }


def reducer_states(tree: Any, path: str = "state") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every result of ``Reducer.state_dict()`` in a tree, with its place."""
    if isinstance(tree, dict):
        if "schema" in tree and all(_holds_arrays(tree.get(kind)) for kind in STATES):
            yield path, tree
            return
        for key, inner in tree.items():
            yield from reducer_states(inner, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for place, inner in enumerate(tree):
            yield from reducer_states(inner, f"{path}[{place}]")


def _holds_arrays(value: Any) -> bool:
    """Return whether it is a dict of NumPy arrays, tensors, or descriptions of either."""
    return isinstance(value, dict) and all(
        hasattr(array, "dtype") and hasattr(array, "shape") for array in value.values()
    )


def _like(old: Any, values: NDArray[np.float64]) -> Any:
    """Return values in the dtype and the library of what they replace."""
    array = np.asarray(values, to_host(old).dtype)
    return array if isinstance(old, np.ndarray) else sys.modules["torch"].from_numpy(array)
