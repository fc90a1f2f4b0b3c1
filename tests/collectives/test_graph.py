"""Graphs of ranks."""

import numpy as np
import pytest

from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.rounds import make_graph


@pytest.mark.parametrize(
    ("edges", "size", "degrees"),
    [
        ("ring", 1, {0}),
        ("ring", 2, {1}),
        ("ring", 5, {2}),
        ("torus", 1, {0}),
        ("torus", 2, {1}),
        ("torus", 4, {2}),  # two by two: both ways around come to the same rank
        ("torus", 6, {3}),
        ("torus", 7, {2}),
        ("torus", 9, {4}),
        ("torus", 64, {4}),
        ([(0, 1), (1, 0), [2, 1]], 3, {1, 2}),
        ([], 1, {0}),
    ],
)
def test_neighbours_are_mutual(edges, size, degrees):
    graph = make_graph(edges, size)
    assert {len(graph.neighbours(rank)) for rank in range(size)} == degrees
    for rank in range(size):
        for other in graph.neighbours(rank):
            assert rank in graph.neighbours(other)
            assert other != rank
    assert graph == make_graph([(b, a) for a, b in graph.edges], size)


@pytest.mark.parametrize(("edges", "size"), [("ring", 2), ("ring", 7), ("torus", 12), ([(0, 1), (0, 2), (0, 3)], 4)])
def test_weights_average_in_the_long_run(edges, size):
    graph = make_graph(edges, size)
    mixing = np.eye(size)
    for a, b in graph.edges:
        weight = graph.weight(a, b)
        assert weight == graph.weight(b, a) == 1 / (1 + max(len(graph.neighbours(a)), len(graph.neighbours(b))))
        mixing[a, b] = mixing[b, a] = weight
        mixing[a, a] -= weight
        mixing[b, b] -= weight
    assert mixing.min() >= 0
    np.testing.assert_allclose(np.linalg.matrix_power(mixing, 500), np.full((size, size), 1 / size), atol=1e-6)


@pytest.mark.parametrize(
    ("edges", "size", "text"),
    [
        (
            [(0, 1), (2, 3)],
            4,
            "rank 2 of 4 cannot be reached from rank 0, so their models would never meet; add an edge",
        ),
        ([], 2, "rank 1 of 2 cannot be reached"),
        ([(0, 4)], 4, r"there are ranks 0 to 3, and edge \(0, 4\) names rank 4"),
        ([(-1, 0)], 4, "names rank -1"),
        ([(0, 1), (1, 1)], 2, r"an edge joins two ranks, got \(1, 1\); leave it out"),
        ([(0, 0)], 1, "an edge joins two ranks"),
        ([(0, 1, 2)], 3, "an edge is a pair of ranks"),
        ([3], 4, "an edge is a pair of ranks, got 3"),
        ([(0, 1.0)], 2, "an edge is a pair of ranks"),
    ],
)
def test_wrong_edges_are_refused(edges, size, text):
    with pytest.raises(ConfigurationError, match=f"graph: .*{text}"):
        make_graph(edges, size)


def test_unknown_graph_error_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'ring'"):
        make_graph("rings", 4)
