"""PowerGossip against dense matrices, one pair of neighbours after the other."""

from itertools import pairwise

import numpy as np
import pytest
from marks import slow

from mpicomp.errors import NonFiniteError
from mpicomp.rounds import make_graph
from mpicomp.systems.optimizers.gossip_rounds import Gossip
from mpicomp.transport import LocalWorld

SHAPES = [(6, 9), (5,), (6, 9), (5,), (12, 3, 4), (2, 2), (), (6, 9), (0,)]
GRAPHS = [("ring", 2), ("ring", 3), ("ring", 4), ("torus", 6), ([(0, 1), (0, 2), (0, 3), (3, 4)], 5)]


def flat(arrays):
    return np.concatenate([array.reshape(-1) for array in arrays])


def draw(size, shapes=SHAPES, seed=0):
    """One model a rank."""
    return [
        flat([np.random.default_rng([seed, rank, n]).normal(size=s) for n, s in enumerate(shapes)])
        for rank in range(size)
    ]


class Reference:
    """The algorithm of the paper on one array of every rank: whole differences of two models, in float64."""

    def __init__(self, models, graph, probes, rate):
        self.models, self.graph, self.probes, self.rate = models, graph, probes, rate
        self.rows = True

    def step(self):
        changes = [np.zeros_like(model) for model in self.models]
        for low, high in sorted(self.graph.edges):
            whole = self.models[low] - self.models[high]
            if self.probes is None:
                seen = whole
            else:
                probe = self.probes[low, high]
                answer = whole.T @ probe if self.rows else whole @ probe
                seen = probe @ answer.T if self.rows else answer @ probe.T
                self.probes[low, high] = gram_schmidt(answer)
            weight = self.rate / (1 + max(len(self.graph.neighbours(low)), len(self.graph.neighbours(high))))
            changes[low] -= weight * seen
            changes[high] += weight * seen
        self.models = [model + change for model, change in zip(self.models, changes, strict=True)]
        self.rows = not self.rows


def gram_schmidt(matrix):
    out = matrix.copy()
    for column in range(out.shape[1]):
        for before in range(column):
            out[:, column] -= (out[:, before] @ out[:, column]) * out[:, before]
        out[:, column] /= np.linalg.norm(out[:, column])
    return out


def distance(models):
    return np.linalg.norm(np.array(models) - np.mean(models, axis=0))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("edges", "size"), GRAPHS, ids=str)
def test_it_is_the_papers_algorithm(edges, size, rank):
    graph = make_graph(edges, size)
    world = LocalWorld(size)
    models = draw(size)
    sides = [Gossip(graph, place, SHAPES, np.dtype(np.float64), rank, rate=0.8) for place in range(size)]
    references = []
    # Of stacks: the three of 6 x 9 do not begin at equal distances, so the third is the second stack of its shape.
    for number, (stack, member) in {0: (0, 0), 2: (0, 1), 4: (1, 0), 7: (2, 0)}.items():
        probes = {}
        for low, high in graph.edges:
            probes[low, high] = sides[low].probes[stack][graph.neighbours(low).index(high)][member]
            assert np.array_equal(
                probes[low, high], sides[high].probes[stack][graph.neighbours(high).index(low)][member]
            )
        references.append((number, Reference(cut(models, number), graph, probes, 0.8)))
    references += [(number, Reference(cut(models, number), graph, None, 0.8)) for number in (1, 3, 5, 6)]
    total, distances = np.sum(models, axis=0), [distance(models)]
    for _ in range(12):
        world.run([side.rounds(model) for side, model in zip(sides, models, strict=True)])
        for number, reference in references:
            reference.step()
            for entry, expected in zip(cut(models, number), reference.models, strict=True):
                np.testing.assert_allclose(entry, expected, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(np.sum(models, axis=0), total, atol=1e-13 * size)
        distances.append(distance(models))
    assert distances == sorted(distances, reverse=True)


def cut(models, number):
    """Give one array of all models, those of several dimensions as matrices."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    start, shape = sum(sizes[:number]), SHAPES[number]
    made = [model[start : start + sizes[number]].copy() for model in models]
    return [array.reshape(shape[0], -1) for array in made] if len(shape) > 1 else made


@pytest.mark.parametrize(("edges", "size"), GRAPHS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_models_come_together_geometrically(edges, size, dtype):
    graph = make_graph(edges, size)
    world = LocalWorld(size)
    models = [model.astype(dtype) for model in draw(size, seed=1)]
    mean = np.mean(np.float64(models), axis=0)
    sides = [Gossip(graph, place, SHAPES, np.dtype(dtype), 2) for place in range(size)]
    distances = []
    for _ in range(8):
        distances.append(distance(np.float64(models)))
        for _ in range(20):
            world.run([side.rounds(model) for side, model in zip(sides, models, strict=True)])
    floor = 100 * np.finfo(dtype).eps * np.linalg.norm(mean)
    for before, after in pairwise(distances):
        assert after < max(0.7 * before, floor)
    np.testing.assert_allclose(np.mean(np.float64(models), axis=0), mean, atol=1e3 * np.finfo(dtype).eps)


def test_messages_are_as_long_as_the_vectors():
    world = LocalWorld(4)
    graph = make_graph("ring", 4)
    models = [model.astype(np.float32) for model in draw(4)]
    sides = [Gossip(graph, place, SHAPES, np.dtype(np.float32), 2) for place in range(4)]
    for _ in range(3):
        world.run([side.rounds(model) for side, model in zip(sides, models, strict=True)])
    plain, columns, rows = 5 + 5 + 4 + 1, 2 * (3 * 9 + 12), 2 * (3 * 6 + 12)
    sent = [4 * 2 * (plain + side) for side in (columns, rows, columns)]
    for end in world.transports:
        assert [(entry.operation, entry.sent_bytes) for entry in end.log] == [("neighbor_alltoall", n) for n in sent]
        assert [entry.wire_bytes for entry in end.log] == sent


@pytest.mark.parametrize("kind", ["equal", "differ in one matrix", "differ by one vector", "differ on one side"])
def test_models_that_hardly_differ(kind):
    """Nothing to find leaves everything as it is, and what comes later is found."""
    graph, world = make_graph("ring", 3), LocalWorld(3)
    models = draw(1) * 3
    models = [model.copy() for model in models]
    differences = {
        "differ in one matrix": [(54 + 5, 2 * 54 + 5)],
        "differ by one vector": [(0, 9)],
        "differ on one side": [(0, 1)],
    }
    sides = [Gossip(graph, place, SHAPES, np.dtype(np.float64), 2) for place in range(3)]
    for start, stop in differences.get(kind, []):
        models[1][start:stop] += 1
    before = [model.copy() for model in models]
    for turn in range(80):
        world.run([side.rounds(model) for side, model in zip(sides, models, strict=True)])
        if turn == 1 and kind == "equal":
            assert all(np.array_equal(model, entry) for model, entry in zip(models, before, strict=True))
            models[0][3] += 1
            before[0][3] += 1
    np.testing.assert_allclose(models, np.broadcast_to(np.mean(before, axis=0), (3, before[0].size)), atol=1e-9)


def test_one_rank_alone_does_nothing():
    (end,) = LocalWorld(1).transports
    model = draw(1)[0]
    side = Gossip(make_graph("torus", 1), 0, SHAPES, np.dtype(np.float64))
    end.run(side.rounds(before := model.copy()))
    assert np.array_equal(model, before)
    assert end.log == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 56])
def test_a_model_that_is_not_finite_is_seen_by_its_neighbours(bad, place):
    graph, size = make_graph([(0, 1), (1, 2), (2, 3)], 4), 4
    models = draw(size)
    models[1][place] = bad
    before = [model.copy() for model in models]
    sides = [Gossip(graph, rank, SHAPES, np.dtype(np.float64)) for rank in range(size)]
    raised = []

    def watched(rank):
        try:
            yield from sides[rank].rounds(models[rank])
        except NonFiniteError:
            raised.append(rank)

    LocalWorld(size).run([watched(rank) for rank in range(size)])
    assert raised == [0, 1, 2]
    for rank in raised:
        assert np.array_equal(models[rank], before[rank], equal_nan=True)


def test_it_goes_on_where_it_stopped():
    graph, world = make_graph("ring", 3), LocalWorld(3)
    models = draw(3)
    sides = [Gossip(graph, place, SHAPES, np.dtype(np.float64)) for place in range(3)]
    others = [Gossip(graph, place, SHAPES, np.dtype(np.float64), seed=7) for place in range(3)]
    for turn in range(5):
        world.run([side.rounds(model) for side, model in zip(sides, models, strict=True)])
        if turn == 2:
            copies = [model.copy() for model in models]
            for side, other in zip(sides, others, strict=True):
                assert other.load_state_dict(side.state_dict())
    for _ in range(2):
        world.run([side.rounds(model) for side, model in zip(others, copies, strict=True)])
    assert all(np.array_equal(model, copy) for model, copy in zip(models, copies, strict=True))
    stranger = Gossip(graph, 0, SHAPES[:1], np.dtype(np.float64))
    assert not stranger.load_state_dict(sides[0].state_dict())
    assert stranger.turn == 0
