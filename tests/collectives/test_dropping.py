"""Collectives that may deliver less than ranks have selected: VAR-Topk and Ok-Topk."""

import numpy as np
import pytest
from lockstep import run

import mpicomp


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
