"""Collectives that may deliver less than ranks have selected: VAR-Topk, gTop-k and Ok-Topk."""

import numpy as np
import oracle
import pytest
from lockstep import dense, run
from marks import slow
from schemes import Above
from worlds import Ranks

import mpicomp


def check_halves(values, wire, rtol):
    """Check that values are numbers of 16 bits."""
    if wire == "fp16":
        np.testing.assert_allclose(values.astype(np.float16).astype(np.float64), values, rtol=rtol)
    else:
        fraction, _ = np.frexp(values)
        np.testing.assert_allclose(fraction * 256, np.rint(fraction * 256), rtol=0, atol=256 * rtol)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3, slow(5), 7])
@pytest.mark.parametrize("kind", ["topk", "above"])
@pytest.mark.parametrize("collective", ["gtopk", "oktopk"])
def test_rounding_error_stays_with_who_rounds(wire, ranks, kind, collective):
    compressor = mpicomp.TopK(ratio=0.1, wire=wire) if kind == "topk" else Above(limit=2.0, wire=wire)
    rng = np.random.default_rng(ranks)
    world = Ranks(ranks, compressor, collective, feedback=True)
    before = np.zeros(3000)
    for _ in range(5):
        gradients = [rng.normal(size=3000) * 10.0 ** rng.integers(-3, 7) for _ in range(ranks)]
        mean = world.reduce([{"w": gradient} for gradient in gradients])[0]["w"]
        after = world.residual_sum("w")
        put_in = np.sum(gradients, axis=0) + before
        np.testing.assert_allclose(ranks * mean + after, put_in, rtol=0, atol=1e-14 * np.abs(put_in).max())
        before = after
        if collective == "oktopk":  # means travel, of gTop-k the sums
            check_halves(mean, wire, rtol=0)
        else:
            check_halves(np.float64(np.float32(ranks * mean)), wire, rtol=1e-6)


@pytest.mark.parametrize("collective", ["gtopk", "oktopk"])
def test_overflow_of_a_sum_is_seen_by_all_ranks(collective):
    large, small = np.array([3e38, 1], np.float32), np.ones(2, np.float32)
    for arrays in ([large, large, small], [large, small]):
        results, *_ = run(mpicomp.TopK(ratio=0.5), collective, arrays)
        assert [result.nonfinite for result in results] == [len(arrays) == 3] * len(arrays)


@pytest.mark.parametrize("collective", ["gtopk", "var-topk"])
def test_ranks_may_select_nothing(collective):
    ones = np.ones(10, np.float32)
    results, *_ = run(Above(limit=2.0), collective, [ones] * 3)
    assert not results[0].mean.any()
    assert (results[0].gain, results[0].kept) == (0.0, 0.0)
    results, *_ = run(Above(limit=2.0), "gtopk", [ones, ones, 3 * ones])
    np.testing.assert_array_equal(results[0].mean, ones)


def test_gtopk_of_equal_elements_keeps_the_lowest_index():
    arrays = [np.roll(np.array([1, 0, 0, 0, 0], np.float32), 4 - rank) for rank in range(5)]
    results, *_ = run(mpicomp.TopK(ratio=0.2), "gtopk", arrays)
    assert np.flatnonzero(results[0].mean).tolist() == [0]


@pytest.mark.parametrize("kind", ["topk", "above"])
def test_gtopk_with_coded_indices_matches_oracle(kind):
    rng = np.random.default_rng(0)
    arrays = [rng.laplace(size=30_000).astype(np.float32) for _ in range(6)]
    compressor = mpicomp.TopK(ratio=0.01) if kind == "topk" else Above(limit=5.0)
    results, *_ = run(compressor, "gtopk", arrays)

    def select(array):
        return oracle.largest(array, 300) if kind == "topk" else np.flatnonzero(np.abs(array) > 5.0)

    mean, left = oracle.gtopk_step(arrays, [np.zeros(30_000)] * 6, select)
    np.testing.assert_allclose(results[0].mean, mean, rtol=1e-6, atol=0)
    for result, array, residual in zip(results, arrays, left, strict=True):
        np.testing.assert_allclose(array - dense(result.sent, array.size), residual, rtol=0, atol=2e-6)


def test_var_topk_of_equal_ranks_is_led_by_the_lowest():
    first = np.array([0, 0, 3, 0], np.float32)
    arrays = [np.array([1, 0, 0, 0], np.float32), first, np.array([0, -3, 0, 0], np.float32)]
    results, *_ = run(mpicomp.TopK(ratio=0.25), "var-topk", arrays)
    assert [result.sent.indices.tolist() for result in results] == [[2]] * 3
    np.testing.assert_array_equal(results[2].mean, first / np.float32(3))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_var_topk_is_not_led_by_a_rank_with_nan(bad):
    arrays = [np.array([1, 0, 0, 0], np.float32), np.array([0, 2, 0, 0], np.float32), np.ones(4, np.float32)]
    arrays[bad][3] = np.nan
    results, *_ = run(mpicomp.TopK(ratio=0.25), "var-topk", arrays)
    assert [result.sent.indices.tolist() for result in results] == [[0 if bad == 1 else 1]] * 3
    assert all(result.nonfinite for result in results)


def test_var_topk_bytes_are_those_of_rounds():
    arrays = [np.arange(1000, dtype=np.float32) * scale for scale in (1, 3, 2)]
    _, transports, scheme, _ = run(mpicomp.TopK(ratio=0.1), "var-topk", arrays)
    rounds = [scheme.rounds(1000, np.dtype(np.float32), end.group) for end in transports]
    for end, expected in zip(transports, rounds, strict=True):
        assert [entry.wire_bytes for entry in end.log] == [task.wire_bytes(end.group) for task in expected]
    sent = [end.log[1].sent_bytes for end in transports]
    assert sent == [0, rounds[0][1].sent_bytes(transports[0].group), 0]
