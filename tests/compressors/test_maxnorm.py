import numpy as np
import pytest
from worlds import Ranks

from mpicomp import MaxNorm


def test_one_in_a_list_is_one():
    assert MaxNorm(bits=[4]) == MaxNorm(bits=(4,)) == MaxNorm(bits=4)
    assert MaxNorm(bits=[4, 6]) == MaxNorm(bits=(4, 6)) != MaxNorm(bits=4)
    assert MaxNorm(bits=[4, 6]).get_config()["bits"] == (4, 6)


def test_bits_count_the_sign():
    assert [MaxNorm(bits=bits).scales for bits in (2, 4, 8, 16)] == [(1,), (7,), (127,), (32767,)]
    assert MaxNorm(bits=[6, 10, 16]).scales == (31, 511, 32767)


def test_how_far_grids_reach():
    array = np.array([3, -4, 0], np.float32)
    assert (MaxNorm().reach(array), MaxNorm(norm="l2").reach(array)) == (4, 5)
    assert (MaxNorm().reach(array[:0]), MaxNorm(norm="l2").reach(array[:0])) == (0, 0)
    for norm in ("max", "l2"):
        for bad in (np.nan, np.inf, -np.inf):
            assert not np.isfinite(MaxNorm(norm=norm).reach(np.array([1, bad, 2], np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, [3, 6]])
def test_what_is_kept_back_stays_bounded(bits):
    """No more than one over ``2 s - 1`` of the largest gradient, here of three ranks of different size."""
    together = Ranks(3, MaxNorm(bits=bits, rounding="nearest"))
    rng, largest = np.random.default_rng(0), 0.0
    scale = 2 ** ((bits if isinstance(bits, int) else bits[0]) - 1) - 1
    for step in range(1000):
        arrays = [(10.0**-rank * rng.standard_t(4, 100)).astype(np.float32) for rank in range(3)]
        largest = max(largest, np.abs(arrays).max())
        together.reduce([{"w": array} for array in arrays])
        if step % 50 == 49:
            kept = np.abs(together.residuals("w")).max()
            assert kept <= largest / (2 * scale - 1) * 1.001
    assert kept > 0
