import numpy as np
import oracle
import pytest
from oracle import cells_of, estimates_of, table_of
from worlds import Ranks

import mpicomp
from mpicomp.compressors import Context

KEY = Context().key(shared=True)


class Server:
    """The step as the paper's code has it, with tables that are dictionaries."""

    def __init__(self, compressor, numel):
        self.compressor, self.numel = compressor, numel
        self.shape = compressor.rows, oracle.kept(compressor.columns, numel)
        self.velocity, self.error = (table_of(np.zeros(0), KEY, *self.shape) for _ in range(2))

    def step(self, gradients):
        mean = table_of(sum(gradients) / len(gradients), KEY, *self.shape)
        for cell, value in mean.items():
            self.velocity[cell] = self.compressor.momentum * self.velocity[cell] + value
            self.error[cell] += self.velocity[cell]
        estimates = estimates_of(self.error, KEY, *self.shape, self.numel)
        delta = np.zeros(self.numel)
        for index in oracle.largest(estimates, oracle.kept(self.compressor.ratio, self.numel)):
            delta[index] = estimates[index]
            for row, column, _ in cells_of(index, KEY, *self.shape):
                self.velocity[row, column] = self.error[row, column] = 0.0
        return delta


def memory(reducer):
    return reducer.state_dict()["memories"]["w"]


def held(reducer, name="error"):
    """A table that a reducer remembers, as a dictionary."""
    table = memory(reducer)[name]
    return {(row, column): value for (row, column), value in np.ndenumerate(table)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("collective", ["sketched-memory:allreduce", "sketched-memory:ring"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fetchsgd_step_is_that_of_the_paper(ranks, collective, momentum):
    compressor = mpicomp.FetchSGD(ratio=0.02, rows=3, columns=0.2, momentum=momentum)
    world, server, rng = Ranks(ranks, compressor, collective), Server(compressor, 200), np.random.default_rng(ranks)
    for _ in range(6):
        gradients = [rng.standard_t(2, size=200) for _ in range(ranks)]
        delta = server.step(gradients)
        means = world.reduce([{"w": gradient} for gradient in gradients])
        assert all(mean["w"].tobytes() == means[0]["w"].tobytes() for mean in means)
        np.testing.assert_allclose(means[0]["w"], delta, rtol=1e-10, atol=1e-12)
        for reducer in world.reducers:
            assert memory(reducer)["error"].tobytes() == memory(world.reducers[0])["error"].tobytes()
    np.testing.assert_allclose(list(held(world.reducers[0]).values()), list(server.error.values()), atol=1e-12)
    np.testing.assert_allclose(
        list(held(world.reducers[0], "velocity").values()), list(server.velocity.values()), atol=1e-12
    )


def test_fetchsgd_cells_not_cleared_lose_nothing():
    """A cell that no delivered element is in holds all that was ever put there; the others are zero at the end."""
    compressor = mpicomp.FetchSGD(ratio=0.01, rows=3, columns=0.5)
    world, rng = Ranks(2, compressor), np.random.default_rng(0)
    heavy = rng.choice(1000, 30, replace=False)
    total, delivered = np.zeros(1000), np.zeros(1000)
    for _ in range(3):
        gradients = [rng.normal(size=1000) for _ in range(2)]
        for gradient in gradients:
            gradient[heavy] += 100
        total += sum(gradients) / 2
        mean = world.reduce([{"w": gradient} for gradient in gradients])[0]["w"]
        delivered += mean
    touched = {cell[:2] for index in np.flatnonzero(delivered).tolist() for cell in cells_of(index, KEY, 3, 500)}
    put_in, kept = table_of(total, KEY, 3, 500), held(world.reducers[0])
    untouched = [cell for cell in put_in if cell not in touched]
    assert len(untouched) > 1000
    np.testing.assert_allclose([kept[cell] for cell in untouched], [put_in[cell] for cell in untouched], atol=1e-9)
    last = {cell[:2] for index in np.flatnonzero(mean).tolist() for cell in cells_of(index, KEY, 3, 500)}
    assert not any(kept[cell] for cell in last)


def test_fetchsgd_without_collisions_loses_nothing():
    """What is set to zero is then the sketch of what is delivered, and no more."""
    compressor = mpicomp.FetchSGD(ratio=0.002, rows=3, columns=1.0)
    world = Ranks(2, compressor)
    places, taken = [], set()
    for index in range(1000):  # ten elements, each alone in all its cells
        cells = {cell[:2] for cell in cells_of(index, KEY, 3, 1000)}
        if len(places) < 10 and taken.isdisjoint(cells):
            places.append(index)
            taken |= cells
    rng = np.random.default_rng(1)
    total, delivered = np.zeros(1000), np.zeros(1000)
    for _ in range(4):
        gradients = [np.zeros(1000) for _ in range(2)]
        for gradient in gradients:
            gradient[places] = rng.normal(size=10)
        total += sum(gradients) / 2
        delivered += world.reduce([{"w": gradient} for gradient in gradients])[0]["w"]
    kept, left = held(world.reducers[0]), table_of(total - delivered, KEY, 3, 1000)
    assert np.abs(delivered).sum() > 0
    np.testing.assert_allclose(list(kept.values()), list(left.values()), atol=1e-12)


def test_fetchsgd_delivers_a_constant_gradient():
    """Where nothing is hidden, the steps deliver what was put in."""
    world = Ranks(2, mpicomp.FetchSGD(ratio=0.05, rows=5, columns=1.0))
    gradient = np.random.default_rng(2).standard_t(3, size=400)
    delivered = sum(world.reduce([{"w": gradient}, {"w": gradient}])[0]["w"].copy() for _ in range(100))
    correlation = np.corrcoef(delivered, gradient)[0, 1]
    assert correlation > 0.95


def test_fetchsgd_tables_stay_bounded():
    world, rng = Ranks(1, mpicomp.FetchSGD(ratio=0.02, columns=0.1, momentum=0.9)), np.random.default_rng(3)
    energies = []
    for step in range(1000):
        world.reduce([{"w": rng.normal(size=1000).astype(np.float32)}])
        if step % 100 == 99:
            energies.append(np.square(memory(world.reducers[0])["error"]).sum())
    assert max(energies[5:]) < 2 * max(energies[:5])


def test_fetchsgd_step_that_agrees_first_counts_once():
    compressor = mpicomp.FetchSGD(ratio=0.05)
    world, plain = Ranks(2, compressor), Ranks(2, compressor)
    rng = np.random.default_rng(5)
    gradients = [[{"w": rng.normal(size=300)} for _ in range(2)] for _ in range(3)]
    for step, each in enumerate(gradients):
        if step == 1:  # the other rank knows of it
            world.world.run(
                [
                    r.rounds(g, absent=["w"] * (rank == 0))
                    for rank, (r, g) in enumerate(zip(world.reducers, each, strict=True))
                ]
            )
        else:
            world.reduce(each)
        plain.reduce(each)
    assert world.reducers[0].last_step.step == 2
    assert memory(world.reducers[0])["error"].tobytes() == memory(plain.reducers[0])["error"].tobytes()


def test_a_bucket_of_another_length_begins_with_empty_tables():
    compressor = mpicomp.FetchSGD(ratio=0.05)
    world = Ranks(1, compressor)
    for _ in range(3):
        world.reduce([{"w": np.ones(300)}])
    longer = {"w": np.ones(300), "x": np.ones(40)}
    means = world.reduce([longer])[0]
    fresh = Ranks(1, compressor).reduce([longer])[0]
    assert all(np.array_equal(means[name], fresh[name]) for name in longer)


def test_fetchsgd_bytes_are_those_of_the_table():
    world = Ranks(3, mpicomp.FetchSGD(ratio=0.01), "sketched-memory:allreduce")
    world.reduce([{"w": np.ones(10_000, np.float32)} for _ in range(3)])
    record = world.reducers[0].last_step.buckets[0]
    assert record.rounds == ["allreduce"]
    assert record.sent_bytes == 4 * (5 * 500 + 4)
    assert record.gain is None
    assert record.ratio_reached == 0.01
    assert mpicomp.FetchSGD().wire_bytes_per_element(4) == pytest.approx(4 * 0.25, rel=1e-3)
