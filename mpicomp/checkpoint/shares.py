"""Residuals and velocities of a reducer, distributed to another number of ranks."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import to_host
from mpicomp.checkpoint.file import RankFile

STATES = ("residuals", "velocities")
"""Keys of a reducer's state whose arrays belong to this rank alone."""


def weights(rank: int, ranks: int, written: int) -> dict[int, float]:
    """Return the share of each old rank's residual that a new rank takes.

    Old and new ranks share the line from 0 to 1 evenly, and weigh as much as their parts overlap. What a rank takes
    sums to 1, so that the mean over ranks stays what it was: that is what error feedback has still to deliver.

    Parameters
    ----------
    rank, ranks : int
        The new rank, and the number of new ranks.
    written : int
        The number of ranks that wrote the checkpoint.

    Examples
    --------
    >>> weights(0, 2, 4), weights(3, 4, 2), weights(1, 2, 3)
    ({0: 0.5, 1: 0.5}, {1: 1.0}, {1: 0.3333333333333333, 2: 0.6666666666666666})
    """
    start, stop = rank * written, (rank + 1) * written  # in parts of which each old rank has `ranks`
    return {
        source: (min(stop, (source + 1) * ranks) - max(start, source * ranks)) / written
        for source in range(start // ranks, -(-stop // ranks))
    }


def reducers(tree: Any, path: str = "state") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every result of ``Reducer.state_dict()`` in a tree, with its place."""
    if isinstance(tree, dict):
        if "schema" in tree and all(_holds_arrays(tree.get(kind)) for kind in STATES):
            yield path, tree
            return
        for key, inner in tree.items():
            yield from reducers(inner, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for place, inner in enumerate(tree):
            yield from reducers(inner, f"{path}[{place}]")


def shared_anew(state: Any, parts: Iterable[tuple[float, RankFile]]) -> Any:
    """Return a state in which reducers' arrays are replaced by weighted sums over files, made in float64."""
    sums: dict[tuple[str, str, str], Any] = {}
    for weight, file in parts:
        for path, reducer_state in reducers(file.tree()):
            for kind in STATES:
                for name, leaf in reducer_state[kind].items():
                    share = weight * to_host(file.read(leaf)).astype(np.float64)
                    sums[path, kind, name] = sums.get((path, kind, name), 0.0) + share
    for path, reducer_state in reducers(state):
        for kind in STATES:
            reducer_state[kind] = {
                name: _like(old, sums[path, kind, name]) for name, old in reducer_state[kind].items()
            }
    return state


def _holds_arrays(value: Any) -> bool:
    """Return whether it is a dict of NumPy arrays, tensors, or descriptions of either."""
    return isinstance(value, dict) and all(
        hasattr(array, "dtype") and hasattr(array, "shape") for array in value.values()
    )


def _like(old: Any, values: NDArray[np.float64]) -> Any:
    """Return values in the dtype and the library of what they replace."""
    array = np.asarray(values, to_host(old).dtype)
    return array if isinstance(old, np.ndarray) else sys.modules["torch"].from_numpy(array)
