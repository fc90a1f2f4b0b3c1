"""Formulas of operations' seconds, counted by following the messages of textbook algorithms."""

from collections import defaultdict, deque

import numpy as np
import pytest
import textbook_messages as messages

from mpicomp.cost.formulas import terms
from mpicomp.mpi.rounds import Round, layout_groups

pytestmark = pytest.mark.quick

BYTE = np.dtype(np.uint8)


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


def operation(name, ranks):
    counts = [96 * ranks] if name in ("allreduce", "bcast") else [96] * ranks
    return Round(name, counts, BYTE, root=1 if name in ("bcast", "gatherv") else 0)


def programs(task, ranks, way):
    return [messages.steps(task, rank, ranks, way) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("name", ["allreduce", "allgatherv", "gatherv", "bcast"])
def test_formulas_count_the_fewest_messages_and_bytes(name, ranks):
    task = operation(name, ranks)
    expected = terms(task, layout_groups(range(ranks), 0)[0])
    # Where all send at once they share the root's link, which is not followed here.
    made = [programs(task, ranks, way) for way in messages.ways(name) if way != "at once"]
    assert min(followed(steps, 1, 0) for steps in made) == pytest.approx(expected.latency)
    assert min(followed(steps, 0, 1) for steps in made) == pytest.approx(expected.volume)


def test_gatherv_at_once_takes_one_step():
    made = programs(operation("gatherv", 4), 4, "at once")
    assert made == [[([(1, 96)], [])], [([], [0, 2, 3])], [([(1, 96)], [])], [([(1, 96)], [])]]


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("way", messages.ways("alltoallv"))
def test_alltoallv_sends_a_part_to_each_rank(way, ranks):
    task = operation("alltoallv", ranks)
    made = programs(task, ranks, way)
    for rank, steps in enumerate(made):
        leaving = [message for step in steps for message in step[0]]
        assert sorted(leaving) == [(other, 96) for other in range(ranks) if other != rank]
    turns = ranks - 1 if way == "in turn" else 1
    assert followed(made, 1, 0) == turns
