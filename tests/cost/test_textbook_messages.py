"""Formulas of operations' seconds, counted by following the messages of textbook algorithms."""

from collections import defaultdict, deque

import numpy as np
import pytest

from mpicomp.cost.formulas import terms
from mpicomp.mpi.rounds import Round, layout_groups

pytestmark = pytest.mark.quick

PART = 96  # bytes of each rank
ROOT = 1


def swapped(partner, nbytes):
    """Return a step, messages to others and the ranks that messages come from: an exchange with a partner."""
    return [(partner, nbytes)], [partner]


def distances(size):
    return [1 << bit for bit in range(size.bit_length() - 1)]


def halves(rank, size):
    """Halves of halves to partners who are farther and farther away, and back (Rabenseifner)."""
    steps = [swapped(rank ^ distance, PART * size // (2 * distance)) for distance in distances(size)]
    return steps + steps[::-1]


def doubling(rank, size):
    """All that a rank has so far to partners who are farther and farther away."""
    return [swapped(rank ^ distance, PART * distance) for distance in distances(size)]


def gather_tree(rank, size):
    """All parts of each subtree to the root of the tree above."""
    place, steps = (rank - ROOT) % size, []
    for distance in distances(size):
        if place & distance:
            return [*steps, ([((rank - distance) % size, PART * distance)], [])]
        steps.append(([], [(rank + distance) % size]))
    return steps


def down_the_tree(rank, size, nbytes):
    """From the root of each subtree to those below it, the one with the most ranks first."""
    place, steps = (rank - ROOT) % size, []
    for distance in reversed(distances(size)):
        if place % (2 * distance) == 0:
            steps.append(([((rank + distance) % size, nbytes(distance))], []))
        elif place % distance == 0:
            steps.append(([], [(rank - distance) % size]))
    return steps


def tree(rank, size):
    return down_the_tree(rank, size, lambda distance: PART * size)


def scatter(rank, size):
    """A part for each rank down the tree, then all parts to all (van de Geijn)."""
    return down_the_tree(rank, size, lambda distance: PART * distance) + doubling(rank, size)


def followed(programs, latency, per_byte):
    """Seconds until all ranks are through their steps, where each message has a link to itself."""
    clocks, left = [0.0] * len(programs), [deque(steps) for steps in programs]
    sent, begun = defaultdict(deque), set()
    while any(left):
        before = sum(map(len, left))
        for rank, steps in enumerate(left):
            if steps and rank not in begun:
                begun.add(rank)
                for peer, nbytes in steps[0][0]:
                    sent[rank, peer].append((clocks[rank], nbytes))
        for rank in sorted(begun):
            leaving, coming = left[rank][0]
            if all(sent[peer, rank] for peer in coming):
                came = [sent[peer, rank].popleft() for peer in coming]
                mine = [(clocks[rank], nbytes) for _, nbytes in leaving]
                ends = [max(clocks[rank], start) + latency + nbytes * per_byte for start, nbytes in came + mine]
                clocks[rank] = max(ends)
                left[rank].popleft()
                begun.remove(rank)
        assert sum(map(len, left)) < before, "ranks wait for each other"
    assert not any(sent.values()), "nobody takes a message"
    return max(clocks)


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize(
    ("operation", "ways"),
    [("allreduce", [halves]), ("allgatherv", [doubling]), ("gatherv", [gather_tree]), ("bcast", [tree, scatter])],
)
def test_formulas_count_the_fewest_messages_and_bytes(operation, ways, ranks):
    counts = [PART * ranks] if operation in ("allreduce", "bcast") else [PART] * ranks
    task = Round(operation, counts, np.dtype(np.uint8), root=ROOT if operation in ("bcast", "gatherv") else 0)
    expected = terms(task, layout_groups(range(ranks), 0)[0])
    made = [[way(rank, ranks) for rank in range(ranks)] for way in ways]
    assert min(followed(steps, 1, 0) for steps in made) == pytest.approx(expected.latency)
    assert min(followed(steps, 0, 1) for steps in made) == pytest.approx(expected.volume)
