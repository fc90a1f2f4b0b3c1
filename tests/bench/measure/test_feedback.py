import numpy as np
import oracle
import pytest
from marks import slow
from mpicomp.bench.measure import feedback
from mpicomp.bench.measure.feedback import Gradients, Selecting, Settled, make_bucket

import mpicomp
from mpicomp.compressors import TopK, get_compressor
from mpicomp.compressors.kinds import SharedSparsifier
from mpicomp.compressors.wire import BITS


@pytest.mark.parametrize(
    "compressor", [mpicomp.TopK(ratio=0.1, wire="q4"), slow(mpicomp.TopK(ratio=1.0, wire="q2"))], ids=str
)
def test_messages_are_rounded_to_the_wire(compressor):
    gradient = np.random.default_rng(0).laplace(size=2000).astype(np.float32)
    bucket, given = make_bucket(gradient.size, compressor, True), gradient.copy()
    count = Selecting(compressor, gradient.size).step(bucket, given, message=True)
    chosen, expected = oracle.largest(gradient, count), gradient.astype(np.float64)
    expected[chosen] -= oracle.few_bits(gradient[chosen], BITS[compressor.wire])
    ((_, residual),) = bucket.residuals()
    np.testing.assert_allclose(residual, expected, atol=1e-5)
    np.testing.assert_array_equal(given, gradient)


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
