"""Sums of gradient and residual that are made part by part."""

import numpy as np
import pytest

from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece, Velocity

SIZES = (7, 1, 20)


def make(dtype=np.float32, momentum=False, turned=False):
    """Return a sum of three pieces; ``turned`` makes one of them no array that can be cut."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype(dtype) for size in SIZES]
    if turned:
        arrays[2] = np.ascontiguousarray(arrays[2].reshape(4, 5).T).T
    numel = sum(SIZES)
    pieces = [Piece(offset, array) for offset, array in zip((0, 7, 8), arrays, strict=True)]
    velocity = Velocity(np.ones(numel, np.float32), np.zeros(numel, np.float32), 0.9, True) if momentum else None
    residual = rng.normal(size=numel).astype(np.float32)
    return GradientWithResidual(
        np.full(numel + TRAILER, np.nan, np.float32), residual, pieces, scale=0.5, velocity=velocity
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(("momentum", "turned"), [(False, False), (True, False), (False, True)])
def test_parts_make_the_sum_that_a_sweep_makes(dtype, momentum, turned):
    whole, apart = make(dtype, momentum, turned), make(dtype, momentum, turned)
    expected = whole.array()
    for start, stop in [(5, 12), (0, 5), (12, 12), (12, 28)]:
        assert apart.part(start, stop).tobytes() == expected[start:stop].tobytes()
    assert apart.is_computed
    assert apart.array().tobytes() == expected.tobytes()
    assert apart.finite
    assert apart.energy == pytest.approx(whole.energy)
    np.testing.assert_allclose(apart.with_trailer()[-TRAILER:], whole.with_trailer()[-TRAILER:], rtol=1e-6)


def test_nothing_else_is_made():
    apart = make()
    apart.part(5, 12)
    assert not apart.is_computed
    assert np.flatnonzero(~np.isnan(apart._buffer)).tolist() == list(range(5, 12))


def test_what_is_stale_is_zeros():
    stale = GradientWithResidual(np.full(3 + TRAILER, np.nan, np.float32), None, [], stale=True)
    assert stale.part(1, 3).tolist() == [0, 0]
    assert stale.is_computed
