import numpy as np
import pytest
from lockstep import run

from mpicomp import TernGrad


def test_how_far_the_grid_reaches():
    array = np.random.default_rng(0).normal(size=10_000).astype(np.float32) + np.float32(0.01)
    array[0] = 50
    deviation = np.sqrt(np.mean(np.float64(array) ** 2))
    assert TernGrad().reach(array) == pytest.approx(2.5 * deviation)
    assert TernGrad(clip=1).reach(array) == pytest.approx(deviation)
    assert TernGrad(clip=None).reach(array) == 50
    assert TernGrad(clip=1000).reach(array) == 50


@pytest.mark.parametrize("value", [3.0, -3.0, 1e-40])
@pytest.mark.parametrize("numel", [1, 100])
def test_equal_elements_are_not_clipped_to_nothing(value, numel):
    """Their standard deviation about the mean is zero."""
    array = np.full(numel, value, np.float32)
    assert TernGrad().reach(array) == abs(array[0])
    [result] = run(TernGrad(), "integer-sum", [np.full(numel, 3.0, np.float32)]).results
    np.testing.assert_array_equal(result.mean, 3)


def test_terngrad_of_elements_whose_squares_vanish_keeps_them():
    assert TernGrad().reach(np.array([1e-200, -2e-200])) == 2e-200


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(bad):
    assert not np.isfinite(TernGrad().reach(np.array([1, bad], np.float32)))
    assert TernGrad().reach(np.empty(0)) == 0


def test_three_values_at_the_scale_that_ranks_share():
    rng = np.random.default_rng(1)
    arrays = [(scale * rng.normal(size=5000)).astype(np.float32) for scale in (1.0, 0.1, 0.5)]
    results = run(TernGrad(), "integer-sum", arrays).results
    shared = max(TernGrad().reach(array) for array in arrays)
    for array, result in zip(arrays, results, strict=True):
        assert np.isin(result.sent, np.float32([-shared, 0, shared])).all()
        assert (result.sent * array >= 0).all()
        chosen = (result.sent != 0).mean()
        expected = np.minimum(np.abs(array) / shared, 1)
        assert abs(chosen - expected.mean()) < 4 * np.sqrt((expected * (1 - expected)).sum()) / array.size


def test_only_clipping_biases():
    assert not TernGrad().unbiased
    assert TernGrad(clip=None).unbiased
    array = np.random.default_rng(2).normal(size=300).astype(np.float32)
    array[0] = 30
    draws = 1000
    reach = TernGrad().reach(array)
    total = sum(
        run(TernGrad(), "integer-sum", [array], step=step).results[0].mean.astype(np.float64) for step in range(draws)
    )
    clipped = np.clip(np.float64(array), -reach, reach)
    deviation = np.sqrt((np.abs(clipped) * (reach - np.abs(clipped))).reshape(6, 50).sum(axis=1) / draws)
    error = (total / draws - clipped).reshape(6, 50).sum(axis=1)
    assert (np.abs(error) <= 4 * deviation + 1e-4).all()
