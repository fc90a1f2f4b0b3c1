"""Formulas against the rounds that are really run."""

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import bind
from mpicomp.cost.formulas import Terms, allgather, broadcast, ring, slowest, terms
from mpicomp.mpi.rounds import Round, layout_groups


def plan_terms(compressor, collective, numel, ranks, layout=None):
    """Sum of a plan's rounds, each as slow as its slowest rank."""
    groups = [layout_groups(layout or range(ranks), rank)[0] for rank in range(ranks)]
    scheme = bind(compressor, collective)
    by_rank = [scheme.rounds(numel, np.dtype(np.float32), group) for group in groups]
    total = Terms(0, 0)
    for tasks in zip(*by_rank, strict=True):
        pairs = [(task, group.part(task.group)) for task, group in zip(tasks, groups, strict=True)]
        total += slowest(terms(task, group) for task, group in pairs)
    return total


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13])
def test_rounds_cost_what_the_formulas_say(ranks):
    numel, plain = 100_000 * ranks, mpicomp.TopK(ratio=0.01, indices="plain")
    kept = 4 * numel * 0.01
    cases = [(mpicomp.Dense(), "ring", ring(ranks, 4 * numel)), (plain, "allgather", allgather(ranks, 2 * kept))]
    for compressor, collective, expected in cases:
        found = plan_terms(compressor, collective, numel, ranks)
        assert found.latency == pytest.approx(expected.latency)
        assert found.volume == pytest.approx(expected.volume, rel=2e-3)  # headers
    star = plan_terms(plain, "star-topk:ring", numel, ranks)
    asked = broadcast(ranks, kept) + ring(ranks, kept)
    assert star.latency == pytest.approx(asked.latency)
    # A library broadcasts large arrays by a scatter and an allgather where that is less than a tree.
    assert star.volume <= asked.volume * 1.002


def test_ranks_of_a_host_share_its_link():
    scattered = plan_terms(mpicomp.Dense(), "scatter-reduce", 80_000, 4, layout=[0, 0, 1, 1])
    alone = plan_terms(mpicomp.Dense(), "scatter-reduce", 80_000, 4)
    # Of 4 parts both ranks of a host send 2 to the other host, where one rank sends 3; then 3 go round.
    assert scattered.volume == pytest.approx(alone.volume * (2 * 2 + 3) / (3 + 3))


@pytest.mark.parametrize(
    ("operation", "counts", "expected"),
    [
        ("allreduce", [800], 2 * 1 / 2 * 800),  # the sum of a host, and the other half back
        ("bcast", [800], 800),
        ("gatherv", [100] * 8, 4 * 100),
        ("allgatherv", [100] * 8, 7 * 100),  # in a ring
        ("alltoallv", [100] * 8, 4 * 4 * 100),
    ],
)
def test_operation_costs_its_bytes_between_hosts(operation, counts, expected):
    task = Round(operation, counts, np.dtype(np.uint8))
    inside = layout_groups([0] * 8, 0)[0]
    assert terms(task, layout_groups([0, 0, 0, 0, 1, 1, 1, 1], 0)[0]).volume == pytest.approx(expected)
    assert terms(task, inside) == terms(task, layout_groups(range(8), 0)[0])  # nobody shares a link inside


def test_one_rank_pays_nothing():
    assert plan_terms(mpicomp.TopK(), "allgather", 1000, 1) == Terms(0, 0)
