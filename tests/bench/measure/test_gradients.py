"""Gradients to measure with, and residuals in their steady state."""

import numpy as np
import pytest
from mpicomp.bench.measure import feedback
from mpicomp.bench.measure.feedback import Gradients, Settled, make_bucket

from mpicomp.compressors import TopK, get_compressor
from mpicomp.compressors.kinds import SharedSparsifier

NUMEL = 20_000


@pytest.mark.parametrize("name", ["topk", "sidco", "dgc", "mstopk", "randomk", "blockrandomk"])
def test_settled_residual_keeps_its_energy(name):
    """Twice as many steps later its energy is the same. These are those that reach the ratio asked for."""
    entry = get_compressor({"id": name, "ratio": 0.01})
    energies = []
    settled = Settled(entry, Gradients(NUMEL))
    bucket = make_bucket(NUMEL, entry, True)
    for _ in range(2):
        settled.fill(bucket)
        energies += [float(np.square(residual).sum()) for _, residual in bucket.residuals()]
        for _ in range(200):
            settled.advance()
    if isinstance(entry, SharedSparsifier):  # elements wait as long as chance has it; 2 is the variance of a gradient
        assert energies[0] / NUMEL == pytest.approx(2 / 0.01 * (1 - np.exp(-feedback._TURNOVERS)), rel=0.1)
    else:
        assert energies[1] == pytest.approx(energies[0], rel=0.1)


def test_long_residual_repeats_the_short_one():
    short = Gradients(1000)
    settled = Settled(TopK(ratio=0.1), short)
    bucket = make_bucket(2500, TopK(), True)
    settled.fill(bucket)
    ((_, residual),) = bucket.residuals()
    first = residual[:1000].copy()
    assert np.count_nonzero(first) > 800
    np.testing.assert_array_equal(residual[1000:2000], first)
    np.testing.assert_array_equal(residual[2000:], first[:500])
    settled.fill(bucket, shift=10)
    np.testing.assert_array_equal(residual[10:1010], first)


def test_gradients_are_fresh_and_laplace():
    laplace = Gradients(100_000)
    first, second = laplace.fresh(), laplace.fresh()
    assert first.shape == second.shape == (100_000,)
    assert first.flags.c_contiguous
    assert not np.array_equal(first, second)
    assert np.abs(first).mean() == pytest.approx(1, rel=0.02)
    assert np.square(first).mean() == pytest.approx(2, rel=0.03)
    assert first.mean() == pytest.approx(0, abs=0.03)
