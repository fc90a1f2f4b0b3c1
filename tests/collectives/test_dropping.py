"""Collectives that may deliver less than ranks have selected: VAR-Topk and Ok-Topk."""

import numpy as np
import pytest
from lockstep import run
from marks import slow
from schemes import Above
from worlds import Ranks

import mpicomp


def check_halves(values, wire):
    """Check that values are numbers of 16 bits."""
    if wire == "fp16":
        np.testing.assert_array_equal(values.astype(np.float16).astype(np.float64), values)
    else:
        fraction, _ = np.frexp(values)
        np.testing.assert_array_equal(fraction * 256, np.rint(fraction * 256))


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3, slow(5), 7])
@pytest.mark.parametrize("kind", ["topk", "above"])
def test_rounding_error_stays_with_who_rounds(wire, ranks, kind):
    compressor = mpicomp.TopK(ratio=0.1, wire=wire) if kind == "topk" else Above(limit=2.0, wire=wire)
    rng = np.random.default_rng(ranks)
    world = Ranks(ranks, compressor, "oktopk", feedback=True)
    before = np.zeros(3000)
    for _ in range(5):
        gradients = [rng.normal(size=3000) * 10.0 ** rng.integers(-3, 7) for _ in range(ranks)]
        mean = world.reduce([{"w": gradient} for gradient in gradients])[0]["w"]
        after = world.residual_sum("w")
        put_in = np.sum(gradients, axis=0) + before
        np.testing.assert_allclose(ranks * mean + after, put_in, rtol=0, atol=1e-14 * np.abs(put_in).max())
        before = after
        check_halves(mean, wire)


def test_overflow_of_a_sum_is_seen_by_all_ranks():
    large, small = np.array([3e38, 1], np.float32), np.ones(2, np.float32)
    for arrays in ([large, large, small], [large, small]):
        results, *_ = run(mpicomp.TopK(ratio=0.5), "oktopk", arrays)
        assert [result.nonfinite for result in results] == [len(arrays) == 3] * len(arrays)


@pytest.mark.parametrize("collective", ["oktopk", "var-topk"])
def test_ranks_may_select_nothing(collective):
    ones = np.ones(10, np.float32)
    results, *_ = run(Above(limit=2.0), collective, [ones] * 3)
    assert not results[0].mean.any()
    assert (results[0].gain, results[0].kept) == (0.0, 0.0)
    results, *_ = run(Above(limit=2.0), "oktopk", [ones, ones, 3 * ones])
    np.testing.assert_array_equal(results[0].mean, ones)


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
    _, transports, scheme, *_ = run(mpicomp.TopK(ratio=0.1), "var-topk", arrays)
    rounds = [scheme.rounds(1000, np.dtype(np.float32), end.group) for end in transports]
    for end, expected in zip(transports, rounds, strict=True):
        assert [entry.wire_bytes for entry in end.log] == [task.wire_bytes(end.group) for task in expected]
    sent = [end.log[1].sent_bytes for end in transports]
    assert sent == [0, rounds[0][1].sent_bytes(transports[0].group), 0]
