"""gTop-k against the definition."""

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("kind", SELECT)
def test_it_is_what_the_oracle_says(ranks, kind):
    compressor, select = SELECT[kind]
    rng = np.random.default_rng(ranks)
    together = Ranks(ranks, compressor, "gtopk", feedback=True)
    residuals = [np.zeros(200) for _ in range(ranks)]
    for _ in range(7):
        common = rng.laplace(size=200)
        gradients = [common + rng.laplace(size=200) for _ in range(ranks)]
        mean, residuals = oracle.gtopk_step(gradients, residuals, select)
        means = together.reduce([{"w": gradient} for gradient in gradients])
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-13)
        for got, residual in zip(together.residuals("w"), residuals, strict=True):
            np.testing.assert_allclose(got, residual, rtol=1e-12, atol=1e-13)


def test_dropped_elements_stay_with_who_drops_them():
    arrays = [np.array(array, np.float32) for array in ([4, 0, 1], [0, -3, 1], [0, 0, 8], [5, 0, 0])]
    results, *_ = run(mpicomp.TopK(ratio=0.34), "gtopk", arrays)
    # 4 beats -3, 8 beats 5, 8 beats 4.
    assert results[0].mean.tolist() == [0, 0, 2]
    assert [dense(result.sent, 3).tolist() for result in results] == [[0, 3, 0], [0, -3, 0], [-5, 0, 8], [5, 0, 0]]


def test_of_equal_elements_the_lowest_index_goes_on():
    arrays = [np.roll(np.array([1, 0, 0, 0, 0], np.float32), 4 - rank) for rank in range(5)]
    results, *_ = run(mpicomp.TopK(ratio=0.2), "gtopk", arrays)
    assert np.flatnonzero(results[0].mean).tolist() == [0]


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3, slow(5), 7])
@pytest.mark.parametrize("kind", ["topk", "above"])
def test_what_rounding_takes_away_stays_with_who_rounds(wire, ranks, kind):
    compressor = mpicomp.TopK(ratio=0.1, wire=wire) if kind == "topk" else Above(limit=2.0, wire=wire)
    rng = np.random.default_rng(ranks)
    together = Ranks(ranks, compressor, "gtopk", feedback=True)
    before = np.zeros(3000)
    for _ in range(5):
        gradients = [rng.normal(size=3000) * 10.0 ** rng.integers(-3, 7) for _ in range(ranks)]
        means = together.reduce([{"w": gradient} for gradient in gradients])
        total = ranks * means[0]["w"]
        after = together.residual_sum("w")
        put_in = np.sum(gradients, axis=0) + before
        np.testing.assert_allclose(total + after, put_in, rtol=0, atol=1e-14 * np.abs(put_in).max())
        before = after
        halves = np.float32(total[total != 0])
        if wire == "fp16":
            np.testing.assert_allclose(halves.astype(np.float16).astype(np.float64), halves, rtol=1e-6)
        else:
            fraction, _ = np.frexp(np.float64(halves))
            np.testing.assert_allclose(fraction * 256, np.rint(fraction * 256), atol=1e-4)


def test_sums_beyond_the_largest_number_are_told_to_all():
    large = np.array([3e38, 1], np.float32)
    results, *_ = run(mpicomp.TopK(ratio=0.5), "gtopk", [large, large, np.ones(2, np.float32)])
    assert all(result.nonfinite for result in results)
    results, *_ = run(mpicomp.TopK(ratio=0.5), "gtopk", [large, np.ones(2, np.float32)])
    assert not any(result.nonfinite for result in results)


def test_nothing_may_be_selected():
    arrays = [np.ones(10, np.float32)] * 3
    results, *_ = run(Above(limit=2.0), "gtopk", arrays)
    assert not results[0].mean.any()
    assert (results[0].gain, results[0].kept) == (0.0, 0.0)
    arrays = [np.ones(10, np.float32), np.ones(10, np.float32), 3 * np.ones(10, np.float32)]
    results, *_ = run(Above(limit=2.0), "gtopk", arrays)
    np.testing.assert_array_equal(results[0].mean, np.ones(10))


def test_large_exchanges_with_coded_indices():
    rng = np.random.default_rng(0)
    arrays = [rng.laplace(size=30_000).astype(np.float32) for _ in range(6)]
    for compressor in (mpicomp.TopK(ratio=0.01), Above(limit=5.0)):
        limit = 0.01 if compressor.count(30_000) else None
        results, *_ = run(compressor, "gtopk", arrays)

        def select(array, limit=limit):
            return oracle.largest(array, 300) if limit else [i for i, value in enumerate(array) if abs(value) > 5.0]

        mean, left = oracle.gtopk_step(arrays, [np.zeros(30_000)] * 6, select)
        np.testing.assert_allclose(results[0].mean, mean, rtol=1e-6, atol=0)
        for result, array, residual in zip(results, arrays, left, strict=True):
            np.testing.assert_allclose(array - dense(result.sent, array.size), residual, rtol=0, atol=2e-6)
