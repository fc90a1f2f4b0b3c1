"""Ok-Topk against the definition."""

import json

import numpy as np
import oracle
import pytest
from lockstep import dense, run
from marks import slow
from schemes import Above
from worlds import Ranks

import mpicomp
from mpicomp.collectives.regions import overlaps
from mpicomp.errors import NonFiniteError

SELECT = {
    "fixed": (mpicomp.TopK(ratio=0.05), lambda array: oracle.largest(array, oracle.kept(0.05, array.size))),
    "varying": (Above(limit=2.0), lambda array: [i for i, value in enumerate(array) if abs(value) > 2.0]),
    "all": (mpicomp.TopK(ratio=1.0), lambda array: list(range(array.size))),
}


def memory_of(together, rank=0):
    return together.reducers[rank].state_dict()["memories"]["w"]["oktopk"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("kind", SELECT)
def test_it_is_what_the_oracle_says(ranks, kind):
    compressor, select = SELECT[kind]
    rng = np.random.default_rng(ranks)
    together, expected = Ranks(ranks, compressor, "oktopk", feedback=True), oracle.Oktopk()
    residuals = [np.zeros(200) for _ in range(ranks)]
    for step in range(36):
        # They grow or shrink for a while, so that a threshold which is used again becomes too low or too high.
        size = 1.15 ** (step % 8) if step < 16 else 0.85 ** (step % 8)
        common = rng.laplace(size=200)
        gradients = [size * (common + 0.5 * rng.laplace(size=200)) for _ in range(ranks)]
        mean, residuals = expected.step(gradients, residuals, select)
        means = together.reduce([{"w": gradient} for gradient in gradients])
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-13)
        for got, residual in zip(together.residuals("w"), residuals, strict=True):
            np.testing.assert_allclose(got, residual, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(memory_of(together)["threshold"], expected.threshold, rtol=1e-12)
        memories = [memory_of(together, rank) for rank in range(ranks)]
        assert all(memory == memories[0] for memory in memories)
    if (kind, ranks) in (("fixed", 3), ("fixed", 6)):
        assert set(expected.events) == {"found", "raised", "lowered"}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_boundaries_follow_the_load_every_64_exchanges(ranks):
    rng = np.random.default_rng(ranks)
    together = Ranks(ranks, mpicomp.TopK(ratio=0.1), "oktopk", feedback=False)
    bounds = None
    for step in range(66):
        falling = np.exp(-np.arange(300) / (20 + step))  # what is large stands at the beginning
        gradients = [falling * rng.normal(size=300) for _ in range(ranks)]
        together.reduce([{"w": gradient} for gradient in gradients])
        if step in (0, 64):
            bounds = oracle.region_bounds([oracle.largest(gradient, 30) for gradient in gradients], 300)
            assert ranks == 1 or bounds[1] < 300 // ranks
        assert memory_of(together)["bounds"] == bounds


def operations(together):
    return [entry.operation for entry in together.world.transports[0].log]


def test_rounds_of_the_first_exchange_and_of_those_that_follow():
    rng = np.random.default_rng(0)
    together = Ranks(3, mpicomp.TopK(ratio=0.1), "oktopk")
    gradient = rng.normal(size=500).astype(np.float32)
    gathers = []
    for _ in range(66):
        together.reduce([{"w": gradient}] * 3)
        gathers.append(operations(together).count("allgatherv"))
    assert operations(together) == ["alltoallv", "alltoallv", "allgatherv", "allgatherv"]
    assert [gathers[step] for step in (32, 64)] == [3, 3]


@pytest.mark.parametrize("ranks", [slow(2), 3, slow(4), slow(7)])
@pytest.mark.parametrize("wire", [None, slow("fp16")])
def test_sums_that_are_all_in_one_region_are_shared_out(ranks, wire):
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


@pytest.mark.parametrize("seed", range(20))
def test_a_list_in_pieces_is_cut_anew(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 7))
    counts = [int(count) for count in rng.integers(0, 5, ranks)]
    ends = sorted(int(end) for end in rng.integers(0, sum(counts) + 1, ranks - 1))
    targets = np.diff([0, *ends, sum(counts)]).tolist()
    holders = [rank for rank, count in enumerate(counts) for _ in range(count)]
    owners = [rank for rank, count in enumerate(targets) for _ in range(count)]
    for rank in range(ranks):
        going = [owner for holder, owner in zip(holders, owners, strict=True) if holder == rank]
        assert overlaps(counts, targets, rank) == [going.count(other) for other in range(ranks)]


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3, slow(5), 7])
@pytest.mark.parametrize("kind", ["topk", "above"])
def test_what_rounding_takes_away_stays_with_who_rounds(wire, ranks, kind):
    compressor = mpicomp.TopK(ratio=0.1, wire=wire) if kind == "topk" else Above(limit=2.0, wire=wire)
    rng = np.random.default_rng(ranks)
    together = Ranks(ranks, compressor, "oktopk", feedback=True)
    before = np.zeros(3000)
    for _ in range(5):
        gradients = [rng.normal(size=3000) * 10.0 ** rng.integers(-3, 7) for _ in range(ranks)]
        [mean, *_] = [own["w"] for own in together.reduce([{"w": gradient} for gradient in gradients])]
        after = together.residual_sum("w")
        put_in = np.sum(gradients, axis=0) + before
        np.testing.assert_allclose(ranks * mean + after, put_in, rtol=0, atol=1e-14 * np.abs(put_in).max())
        before = after
        if wire == "fp16":
            np.testing.assert_array_equal(mean.astype(np.float16).astype(np.float64), mean)
        else:
            fraction, _ = np.frexp(mean)
            np.testing.assert_array_equal(fraction * 256, np.rint(fraction * 256))


def test_all_of_equal_magnitudes_are_delivered():
    arrays = [np.zeros(40, np.float32) for _ in range(4)]
    for rank, array in enumerate(arrays):
        array[rank * 10 : rank * 10 + 5] = (-1.0) ** rank
    results, *_ = run(mpicomp.TopK(ratio=0.125), "oktopk", arrays)
    np.testing.assert_array_equal(results[0].mean, np.sum(arrays, axis=0) / 4)
    assert results[0].kept == 20


def test_nothing_may_be_selected():
    together = Ranks(3, Above(limit=2.0), "oktopk")
    for scale, delivered in ((1, False), (0.5, False), (5, True), (0.1, False), (4, True)):
        means = together.reduce([{"w": np.full(10, scale, np.float32)}] * 3)
        # Residuals have grown by what was not delivered.
        assert means[0]["w"].any() == delivered
    one = [np.ones(10, np.float32), np.ones(10, np.float32), np.linspace(0, 9, 10, dtype=np.float32)]
    results, *_ = run(Above(limit=8.5), "oktopk", one)
    np.testing.assert_array_equal(np.flatnonzero(results[0].mean), [9])


def test_sums_beyond_the_largest_number_are_told_to_all():
    large = np.array([3e38, 1], np.float32)
    results, *_ = run(mpicomp.TopK(ratio=0.5), "oktopk", [large, large, np.ones(2, np.float32)])
    assert all(result.nonfinite for result in results)
    results, *_ = run(mpicomp.TopK(ratio=0.5), "oktopk", [large, np.ones(2, np.float32)])
    assert not any(result.nonfinite for result in results)


def test_memory_survives_checkpoints_and_undone_steps():
    together = Ranks(2, mpicomp.TopK(ratio=0.5), "oktopk")
    good = {"w": np.array([1, -2, 3, 4], np.float32)}
    together.reduce([good] * 2)
    for bad in (np.nan, np.inf):
        with pytest.raises(NonFiniteError):
            together.reduce([good, {"w": np.full(4, bad, np.float32)}])
    memory = memory_of(together)
    assert json.loads(json.dumps(memory, allow_nan=False)) == memory
    means = together.reduce([{"w": np.zeros(4, np.float32)}] * 2)
    assert np.isfinite(means[0]["w"]).all()


def test_a_checkpoint_resumes_bit_for_bit_and_on_other_ranks():
    rng = np.random.default_rng(0)
    pool = [[{"w": rng.laplace(size=300).astype(np.float32)} for _ in range(3)] for _ in range(8)]
    first, second = (Ranks(3, mpicomp.TopK(ratio=0.1), "oktopk") for _ in range(2))
    for gradients in pool[:4]:
        first.reduce(gradients)
    states = [reducer.state_dict() for reducer in first.reducers]
    for reducer, state in zip(second.reducers, states, strict=True):
        reducer.load_state_dict(state)
    for gradients in pool[4:]:
        expected = first.reduce(gradients)[0]["w"].copy()
        assert second.reduce(gradients)[0]["w"].tobytes() == expected.tobytes()
    fewer = Ranks(2, mpicomp.TopK(ratio=0.1), "oktopk")
    for reducer, state in zip(fewer.reducers, states, strict=False):
        reducer.load_state_dict(state)
    means = fewer.reduce(pool[5][:2])
    put_in = sum(state["residuals"]["w"].astype(np.float64) for state in states[:2])
    put_in += sum(gradient["w"].astype(np.float64) for gradient in pool[5][:2])
    np.testing.assert_allclose(2 * means[0]["w"] + fewer.residual_sum("w"), put_in, rtol=0, atol=1e-5)
    assert memory_of(fewer)["ranks"] == 2
