import numpy as np
import pytest
from worlds import Ranks

import mpicomp
from mpicomp import MaxNorm
from mpicomp.collectives import fitting
from mpicomp.errors import ConfigurationError
from mpicomp.testing import checks

FORMS = [MaxNorm(bits=[6, 10]), MaxNorm(norm="l2"), MaxNorm(bits=3, rounding="nearest")]


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=f"{form}-{check.__name__}") for form in FORMS for check in checks(form)],
)
def test_laws(check):
    check()


@pytest.mark.parametrize("bits", [1, 17, 0, -4, 4.0, True, None, "4", [], [4, True], [6, 17], [1, 2], "46"])
def test_bits_are_two_to_sixteen(bits):
    with pytest.raises(
        ConfigurationError, match=r"maxnorm: bits must be a whole number from 2 to 16, or several, got "
    ):
        MaxNorm(bits=bits)


@pytest.mark.parametrize("bits", [[10, 6], [6, 6], [4, 8, 7]])
def test_several_bits_ascend(bits):
    with pytest.raises(ConfigurationError, match=r"maxnorm: bits of several grids must ascend without repetition"):
        MaxNorm(bits=bits)


def test_norms_and_roundings_have_names():
    with pytest.raises(ConfigurationError, match="maxnorm: norm must be 'max' or 'l2', got 'l1'"):
        MaxNorm(norm="l1")
    with pytest.raises(ConfigurationError, match="maxnorm: rounding must be 'stochastic' or 'nearest', got 'up'"):
        MaxNorm(rounding="up")
    with pytest.raises(ConfigurationError, match="maxnorm: rounding='nearest' needs norm='max'"):
        MaxNorm(norm="l2", rounding="nearest")


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


def test_rounded_at_random_it_is_refused_with_feedback_naming_the_form_that_is_not():
    for compressor in FORMS[:2]:
        assert compressor.unbiased
        with pytest.raises(ConfigurationError, match=r"maxnorm: .*not contractive.*MaxNorm\(.*rounding='nearest'\)"):
            mpicomp.Reducer(compressor, feedback=True, comm=Ranks(1).world.transports[0])
    assert mpicomp.Reducer(FORMS[2], comm=Ranks(1).world.transports[0]).feedback


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


def test_zeros_stay_zeros():
    for compressor in FORMS:
        together = Ranks(3, compressor)
        for _ in range(3):
            means = together.reduce([{"w": np.zeros(500, np.float32)}] * 3)
            assert not any(mean["w"].any() for mean in means)
        assert together.reducers[0].last_step.buckets[0].gain == 1


def test_what_carries_it():
    assert fitting(MaxNorm) == fitting(MaxNorm()) == ["integer-sum", "hierarchical"]
