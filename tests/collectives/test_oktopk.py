"""Ok-Topk against the definition."""

import numpy as np
import oracle
import pytest
from lockstep import dense, run
from marks import slow
from schemes import Above
from worlds import Ranks

import mpicomp

SELECT = {
    "fixed": (mpicomp.TopK(ratio=0.05), lambda array: oracle.largest(array, oracle.kept(0.05, array.size))),
    "varying": (Above(limit=2.0), lambda array: [i for i, value in enumerate(array) if abs(value) > 2.0]),
    "all": (mpicomp.TopK(ratio=1.0), lambda array: list(range(array.size))),
}


def memory_of(world, rank=0):
    return world.reducers[rank].state_dict()["memories"]["w"]["oktopk"]


@pytest.mark.parametrize("ranks", [1, 2, 3, slow(4), slow(5), 6, slow(7)])
@pytest.mark.parametrize("kind", SELECT)
def test_oktopk_matches_oracle(ranks, kind):
    compressor, select = SELECT[kind]
    rng = np.random.default_rng(ranks)
    world, expected = Ranks(ranks, compressor, "oktopk", feedback=True), oracle.Oktopk()
    residuals = [np.zeros(200) for _ in range(ranks)]
    for step in range(36):
        # They grow or shrink for a while, so that a threshold which is used again becomes too low or too high.
        size = 1.15 ** (step % 8) if step < 16 else 0.85 ** (step % 8)
        common = rng.laplace(size=200)
        gradients = [size * (common + 0.5 * rng.laplace(size=200)) for _ in range(ranks)]
        mean, residuals = expected.step(gradients, residuals, select)
        means = world.reduce([{"w": gradient} for gradient in gradients])
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-13)
        for got, residual in zip(world.residuals("w"), residuals, strict=True):
            np.testing.assert_allclose(got, residual, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(memory_of(world)["threshold"], expected.threshold, rtol=1e-12)
        memories = [memory_of(world, rank) for rank in range(ranks)]
        assert all(memory == memories[0] for memory in memories)
    if (kind, ranks) in (("fixed", 3), ("fixed", 6)):
        assert set(expected.events) == {"found", "raised", "lowered"}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_boundaries_follow_the_load_every_64_exchanges(ranks):
    rng = np.random.default_rng(ranks)
    world = Ranks(ranks, mpicomp.TopK(ratio=0.1), "oktopk", feedback=False)
    bounds = None
    for step in range(66):
        falling = np.exp(-np.arange(300) / (20 + step))  # what is large stands at the beginning
        gradients = [falling * rng.normal(size=300) for _ in range(ranks)]
        world.reduce([{"w": gradient} for gradient in gradients])
        if step in (0, 64):
            bounds = oracle.region_bounds([oracle.largest(gradient, 30) for gradient in gradients], 300)
            assert ranks == 1 or bounds[1] < 300 // ranks
        assert memory_of(world)["bounds"] == bounds


def operations(world):
    return list(world.reducers[0].last_step.buckets[0].rounds)


def test_threshold_and_regions_are_renewed_in_few_steps():
    rng = np.random.default_rng(0)
    world = Ranks(3, mpicomp.TopK(ratio=0.1), "oktopk")
    gradient = rng.normal(size=500).astype(np.float32)
    gathers = []
    for _ in range(66):
        world.reduce([{"w": gradient}] * 3)
        gathers.append(operations(world).count("allgatherv"))
    assert operations(world) == ["alltoallv", "alltoallv", "allgatherv", "allgatherv"]
    assert [gathers[step] for step in (32, 64)] == [3, 3]


@pytest.mark.parametrize("ranks", [slow(2), 3, slow(4), slow(7)])
@pytest.mark.parametrize("wire", [None, slow("fp16")])
def test_sums_in_one_region_are_shared_out(ranks, wire):
    rng = np.random.default_rng(ranks)
    numel, k = 90_000, 10_800
    place = numel // ranks if ranks > 2 else 0
    common = place + rng.permutation(numel // ranks)[:k]
    arrays = []
    for _ in range(ranks):
        array = 1e-3 * rng.normal(size=numel)
        array[common] = 100 + 10 * rng.normal(size=k)
        arrays.append(array.astype(np.float32))
    outcome = run(mpicomp.TopK(ratio=k / numel, wire=wire), "oktopk", arrays)
    logs = [end.log for end in outcome.transports]
    # Of two ranks neither can have more than twice the mean.
    assert [entry.operation for entry in logs[0]].count("alltoallv") == (2 if ranks == 2 else 3)
    assert outcome.results[0].kept == k
    if ranks > 2:
        gathers = [[entry.sent_bytes for entry in log if entry.operation == "allgatherv"] for log in logs]
        messages = [sent[-1 if wire is None else -2] for sent in gathers]
        assert max(messages) - min(messages) <= 64
    mean, left = oracle.Oktopk().step(arrays, [np.zeros(numel)] * ranks, lambda array: oracle.largest(array, k))
    for result, array, residual in zip(outcome.results, arrays, left, strict=True):
        assert result.mean.tobytes() == outcome.results[0].mean.tobytes()
        np.testing.assert_allclose(result.mean, mean, rtol=1e-6 if wire is None else 2**-10, atol=0)
        if wire is None:
            np.testing.assert_array_equal(array - dense(result.sent, numel), residual)


def test_sums_of_equal_magnitude_are_all_delivered():
    arrays = [np.zeros(40, np.float32) for _ in range(4)]
    for rank, array in enumerate(arrays):
        array[rank * 10 : rank * 10 + 5] = (-1.0) ** rank
    results, *_ = run(mpicomp.TopK(ratio=0.125), "oktopk", arrays)
    np.testing.assert_array_equal(results[0].mean, np.sum(arrays, axis=0) / 4)
    assert results[0].kept == 20


def test_oktopk_ranks_may_select_nothing():
    world = Ranks(3, Above(limit=2.0), "oktopk")
    for scale, delivered in ((1, False), (0.5, False), (5, True), (0.1, False), (4, True)):
        means = world.reduce([{"w": np.full(10, scale, np.float32)}] * 3)
        # Residuals have grown by what was not delivered.
        assert means[0]["w"].any() == delivered
    one = [np.ones(10, np.float32), np.ones(10, np.float32), np.linspace(0, 9, 10, dtype=np.float32)]
    results, *_ = run(Above(limit=8.5), "oktopk", one)
    np.testing.assert_array_equal(np.flatnonzero(results[0].mean), [9])
