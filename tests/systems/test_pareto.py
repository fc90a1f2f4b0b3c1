"""Fronts against the definition, and choices against their formulas."""

import sys

import numpy as np
import pytest

from mpicomp.errors import ConfigurationError
from mpicomp.systems import flexible


def dominates(one, other):
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def brute_front(rows):
    """Give the vectors that nothing dominates, by comparing every two."""
    return {tuple(row) for row in rows if not any(dominates(other, row) for other in rows)}


@pytest.mark.parametrize("objectives", [1, 2, 3])
@pytest.mark.parametrize("kind", ["real", "ties"])
def test_the_front_is_what_nothing_dominates(objectives, kind):
    random = np.random.default_rng(objectives)
    for _ in range(100):
        size = (int(random.integers(1, 25)), objectives)
        rows = random.random(size) if kind == "real" else random.integers(0, 4, size).astype(float)
        found = flexible.pareto_front(rows)
        vectors = [tuple(rows[place]) for place in found]
        assert set(vectors) == brute_front(rows.tolist())
        assert len(set(vectors)) == len(vectors)
        assert vectors == sorted(vectors)
        for place, vector in zip(found, vectors, strict=True):
            assert place == rows.tolist().index(list(vector))  # of equal rows the first


def scaled(rows):
    low, high = [min(c) for c in zip(*rows, strict=True)], [max(c) for c in zip(*rows, strict=True)]
    return [[(v - a) / (b - a) if b > a else 0.0 for v, a, b in zip(row, low, high, strict=True)] for row in rows]


def test_choices_are_those_of_the_formulas():
    random = np.random.default_rng(5)
    for _ in range(100):
        rows = random.random((30, 2)) * [3.0, 100.0]
        front = rows[flexible.pareto_front(rows)]
        unit = scaled(front.tolist())
        worst = [max(0.6 * time, 0.4 * gain) for time, gain in unit]
        assert worst[flexible.weighted(front, (0.6, 0.4))] == min(worst)
        # Distance below the line from one end to the other, which has time + gain = 1.
        below = [1 - time - gain for time, gain in unit]
        assert below[flexible.knee(front)] == pytest.approx(max(below), abs=1e-12)


def test_a_front_of_one_or_of_equal_objectives():
    for rows in ([[2.0, 3.0]], [[0.0, 3.0]]):
        assert flexible.knee(np.array(rows)) == flexible.weighted(np.array(rows), (0.6, 0.4)) == 0
    np.testing.assert_array_equal(flexible.normalised(np.array([[1.0, 5.0], [1.0, 7.0]])), [[0, 0], [0, 1]])


def test_nsga_finds_the_front_of_a_known_problem():
    pytest.importorskip("pymoo")

    def schaffer(variables):
        return np.stack((variables[:, 0] ** 2, (variables[:, 0] - 2) ** 2 + variables[:, 1]), axis=1)

    before = np.random.get_state()[1].copy()  # noqa: NPY002, a user's own state
    found = flexible.evolve(schaffer, [-3.0, 0.0], [5.0, 1.0])
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert found[:, 0].min() == pytest.approx(0, abs=0.1)
    assert found[:, 0].max() == pytest.approx(2, abs=0.1)
    values = schaffer(found)
    # On the front sqrt(f1) + sqrt(f2) = 2.
    assert np.abs(np.sqrt(values).sum(axis=1) - 2).mean() < 0.1
    np.testing.assert_array_equal(flexible.evolve(schaffer, [-3.0, 0.0], [5.0, 1.0]), found)


def test_without_pymoo_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymoo", None)
    with pytest.raises(ConfigurationError, match=r"needs pymoo, which is not installed; pip install 'mpicomp\[nsga\]'"):
        flexible.evolve(lambda variables: variables, [0.0], [1.0])
