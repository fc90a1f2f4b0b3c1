"""Collectives that may deliver less than ranks have selected: VAR-Topk and Ok-Topk."""

import numpy as np
import pytest
from lockstep import run
from schemes import Above

import mpicomp


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
