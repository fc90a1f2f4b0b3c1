"""Values of selections in eight, four or two bits: who carries them, and what becomes of the errors."""

import numpy as np
import oracle
import pytest
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind, fitting
from mpicomp.compressors.wire import BITS
from mpicomp.errors import IncompatiblePairError

CARRIERS = ["allgather", "hierarchical"]
NUMEL, RATIO = 2000, 0.3  # some blocks of 256, the last one not full


def gradients(step, ranks):
    rngs = [np.random.default_rng((step, rank)) for rank in range(ranks)]
    return [{"w": (10.0 ** (rank % 3) * rng.standard_t(2, NUMEL)).astype(np.float32)} for rank, rng in enumerate(rngs)]


@pytest.mark.parametrize("wire", BITS)
def test_few_bits_are_carried_whole_only(wire):
    assert fitting(mpicomp.TopK(wire=wire)) == CARRIERS
    assert set(fitting(mpicomp.TopK())) > set(CARRIERS)
    for other in sorted(set(fitting(mpicomp.TopK())) - set(CARRIERS)):
        text = (
            rf"TopK\(wire='{wire}'\): does not fit collective '{other}', which cuts messages or adds to them, whose "
            "values share scales here; use allgather or hierarchical"
        )
        with pytest.raises(IncompatiblePairError, match=text):
            bind(mpicomp.TopK(wire=wire), other)
        with pytest.raises(IncompatiblePairError, match=text):
            bind(mpicomp.TopK(wire=wire), f"hierarchical:{other}")


@pytest.mark.parametrize("collective", CARRIERS)
@pytest.mark.parametrize("wire", BITS)
def test_step_of_few_bits_matches_oracle(wire, collective):
    ranks = 2
    compressor = mpicomp.TopK(ratio=RATIO, wire=wire)
    world = Ranks(ranks, compressor, collective, hosts=[0, 1])
    arrays = gradients(0, ranks)
    means = world.reduce(arrays)
    expected = np.zeros(NUMEL)
    for array, left in zip(arrays, world.residuals("w"), strict=True):
        chosen = oracle.largest(array["w"], round(RATIO * NUMEL))
        sent = oracle.few_bits(array["w"][chosen], BITS[wire])
        expected[chosen] += sent / ranks
        kept = array["w"].astype(np.float64)
        kept[chosen] -= sent
        np.testing.assert_allclose(left, kept, rtol=0, atol=1e-6 * np.abs(sent).max())
    np.testing.assert_allclose(means[0]["w"], expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
