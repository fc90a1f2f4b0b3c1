"""The messages that a round stands for: textbook algorithms of a library's operations, among a power of two of ranks.

`mpicomp.cost.formulas` counts their latencies and bytes. Where it takes a library to know the best way, for short and
for long arrays, there are several here.
"""

from collections.abc import Callable

from mpicomp.mpi.rounds import Round

Step = tuple[list[tuple[int, int]], list[int]]
"""What one rank does at once: messages to others, with their bytes, and whom it has messages from."""


def ways(operation: str) -> tuple[str, ...]:
    return tuple(_WAYS[operation])


def steps(task: Round, rank: int, size: int, way: str) -> list[Step]:
    """Return what a rank of a round's group does by one of `ways`, step by step."""
    assert size & (size - 1) == 0, f"these are among a power of two of ranks, got {size}"
    made = _WAYS[task.operation][way](task, rank, size) if size > 1 else []
    return [step for step in made if step != ([], [])]


def _pair(task: Round, _rank: int, _size: int) -> list[Step]:
    target, source = task.peers
    leaving = [] if target is None else [(target, task.counts[0] * task.dtype.itemsize)]
    return [(leaving, [] if source is None else [source])]


def _halves(task: Round, rank: int, size: int) -> list[Step]:
    """Return halves of halves to partners who are farther and farther away, and back (Rabenseifner)."""
    nbytes, made = task.counts[0] * task.dtype.itemsize, []
    for distance in _distances(size):
        nbytes = -(-nbytes // 2)
        made.append(_with(rank ^ distance, nbytes))
    return made + made[::-1]


def _reduce_ring(task: Round, rank: int, size: int) -> list[Step]:
    part = -(-task.counts[0] * task.dtype.itemsize // size)
    return [([((rank + 1) % size, part)], [(rank - 1) % size])] * (2 * (size - 1))


def _doubling(task: Round, rank: int, size: int) -> list[Step]:
    """Return all that one has so far to partners who are farther and farther away."""
    made = []
    for distance in _distances(size):
        first = rank // distance * distance
        made.append(_with(rank ^ distance, sum(task.counts[first : first + distance]) * task.dtype.itemsize))
    return made


def _gather_ring(task: Round, rank: int, size: int) -> list[Step]:
    left, right = (rank - 1) % size, (rank + 1) % size
    return [([(right, task.counts[(rank - turn) % size] * task.dtype.itemsize)], [left]) for turn in range(size - 1)]


def _in_turn(task: Round, rank: int, size: int) -> list[Step]:
    """Return a message to the rank that is one farther away each time, and from the one on the other side."""
    made: list[Step] = []
    for distance in range(1, size):
        target = (rank + distance) % size
        made.append(([(target, task.counts[target] * task.dtype.itemsize)], [(rank - distance) % size]))
    return made


def _at_once(task: Round, rank: int, size: int) -> list[Step]:
    every = _in_turn(task, rank, size)
    return [([leaving for step in every for leaving in step[0]], [source for step in every for source in step[1]])]


def _gather_tree(task: Round, rank: int, size: int) -> list[Step]:
    """Return all parts of each subtree to the root of the tree above."""
    place, made = (rank - task.root) % size, list[Step]()
    for distance in _distances(size):
        if place & distance:
            parts = [task.counts[(task.root + part) % size] for part in range(place, place + distance)]
            return [*made, ([((rank - distance) % size, sum(parts) * task.dtype.itemsize)], [])]
        made.append(([], [(rank + distance) % size]))
    return made


def _to_root(task: Round, rank: int, size: int) -> list[Step]:
    others = [other for other in range(size) if other != task.root]
    if rank == task.root:
        return [([], others)]
    return [([(task.root, task.counts[rank] * task.dtype.itemsize)], [])]


def _tree(task: Round, rank: int, size: int) -> list[Step]:
    nbytes = task.counts[0] * task.dtype.itemsize
    return _down_the_tree(rank, size, task.root, lambda distance: nbytes)


def _scatter(task: Round, rank: int, size: int) -> list[Step]:
    """Return a part for each rank down the tree, then all parts to all (van de Geijn)."""
    part = -(-task.counts[0] * task.dtype.itemsize // size)
    shared = [_with(rank ^ distance, part * distance) for distance in _distances(size)]
    return _down_the_tree(rank, size, task.root, lambda distance: part * distance) + shared


def _down_the_tree(rank: int, size: int, root: int, nbytes: Callable[[int], int]) -> list[Step]:
    """Return messages from the root of each subtree to those below it, the one with the most ranks first."""
    place, made = (rank - root) % size, list[Step]()
    for distance in reversed(_distances(size)):
        if place % (2 * distance) == 0:
            made.append(([((rank + distance) % size, nbytes(distance))], []))
        elif place % distance == 0:
            made.append(([], [(rank - distance) % size]))
    return made


def _with(partner: int, nbytes: int) -> Step:
    return [(partner, nbytes)], [partner]


def _distances(size: int) -> list[int]:
    return [1 << bit for bit in range(size.bit_length() - 1)]


_WAYS: dict[str, dict[str, Callable[[Round, int, int], list[Step]]]] = {
    "sendrecv": {"pair": _pair},
    "allreduce": {"halves": _halves, "ring": _reduce_ring},
    "allgatherv": {"doubling": _doubling, "ring": _gather_ring},
    "alltoallv": {"in turn": _in_turn, "at once": _at_once},
    "gatherv": {"tree": _gather_tree, "at once": _to_root},
    "bcast": {"tree": _tree, "scatter": _scatter},
}
