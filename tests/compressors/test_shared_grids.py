"""MaxNorm and TernGrad: grids that ranks share."""

import numpy as np
import pytest
from lockstep import run

from mpicomp import MaxNorm, TernGrad


def test_maxnorm_bits_count_the_sign_of_one_or_more_grids():
    assert [MaxNorm(bits=bits).scales for bits in (2, 4, 8, 16)] == [(1,), (7,), (127,), (32767,)]
    assert MaxNorm(bits=[6, 10, 16]).scales == (31, 511, 32767)
    assert MaxNorm(bits=[4]) == MaxNorm(bits=(4,)) == MaxNorm(bits=4)
    assert MaxNorm(bits=[4, 6]) == MaxNorm(bits=(4, 6)) != MaxNorm(bits=4)
    assert MaxNorm(bits=[4, 6]).get_config()["bits"] == (4, 6)


NORMAL = np.random.default_rng(0).normal(size=10_000).astype(np.float32) + np.float32(0.01)
NORMAL[0] = 50
DEVIATION = np.sqrt(np.mean(np.float64(NORMAL) ** 2))


@pytest.mark.parametrize(
    ("compressor", "array", "reach"),
    [
        (MaxNorm(), np.float32([3, -4, 0]), 4),
        (MaxNorm(norm="l2"), np.float32([3, -4, 0]), 5),
        (TernGrad(), NORMAL, 2.5 * DEVIATION),
        (TernGrad(clip=1), NORMAL, DEVIATION),
        (TernGrad(clip=None), NORMAL, 50),
        (TernGrad(clip=1000), NORMAL, 50),
        # The standard deviation of equal elements is zero, but their mean square is not.
        *((TernGrad(), np.full(n, v, np.float32), abs(np.float32(v))) for n in (1, 100) for v in (3.0, -3.0, 1e-40)),
        (TernGrad(), np.array([1e-200, -2e-200]), 2e-200),  # whose squares vanish
        *((compressor, np.empty(0), 0) for compressor in (MaxNorm(), MaxNorm(norm="l2"), TernGrad())),
    ],
)
def test_grid_reaches_as_far_as_stated(compressor, array, reach):
    assert compressor.reach(array) == pytest.approx(reach, rel=1e-6, abs=0)


@pytest.mark.parametrize("compressor", [MaxNorm(), MaxNorm(norm="l2"), TernGrad(), TernGrad(clip=None)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_grid_of_an_element_that_is_not_finite_shows_it(compressor, bad):
    assert not np.isfinite(compressor.reach(np.array([1, bad, 2], np.float32)))


@pytest.mark.parametrize("numel", [1, 100])
def test_terngrad_delivers_equal_elements(numel):
    [result] = run(TernGrad(), "integer-sum", [np.full(numel, 3.0, np.float32)]).results
    np.testing.assert_array_equal(result.mean, 3)


def test_terngrad_sends_three_values_at_the_shared_scale():
    rng = np.random.default_rng(1)
    arrays = [(scale * rng.normal(size=5000)).astype(np.float32) for scale in (1.0, 0.1, 0.5)]
    results = run(TernGrad(), "integer-sum", arrays).results
    shared = max(TernGrad().reach(array) for array in arrays)
    for array, result in zip(arrays, results, strict=True):
        assert np.isin(result.sent, np.float32([-shared, 0, shared])).all()
        assert (result.sent * array >= 0).all()
        expected = np.minimum(np.abs(array) / shared, 1)
        deviation = np.sqrt((expected * (1 - expected)).sum()) / array.size
        assert abs((result.sent != 0).mean() - expected.mean()) < 4 * deviation


def test_terngrad_is_biased_by_clipping_only():
    assert not TernGrad().unbiased
    assert TernGrad(clip=None).unbiased
    array = np.random.default_rng(2).normal(size=300).astype(np.float32)
    array[0] = 30
    draws, reach = 1000, TernGrad().reach(array)
    total = sum(
        run(TernGrad(), "integer-sum", [array], step=step).results[0].mean.astype(np.float64) for step in range(draws)
    )
    clipped = np.clip(np.float64(array), -reach, reach)
    deviation = np.sqrt((np.abs(clipped) * (reach - np.abs(clipped))).reshape(6, 50).sum(axis=1) / draws)
    error = (total / draws - clipped).reshape(6, 50).sum(axis=1)
    assert (np.abs(error) <= 4 * deviation + 1e-4).all()
