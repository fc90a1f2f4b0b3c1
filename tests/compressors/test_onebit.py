import numpy as np
import pytest
from oracle import scaled_signs
from worlds import Ranks

import mpicomp
from mpicomp import OneBit
from mpicomp.collectives import fitting
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.testing import checks


@pytest.mark.parametrize("block", [64, 1024])
@pytest.mark.parametrize("check", checks(OneBit()), ids=lambda check: check.__name__)
def test_laws(check, block):
    check.law(OneBit(block=block))


@pytest.mark.parametrize("block", [0, -64, 1, 100, 64.0, True, None, "64"])
def test_blocks_are_whole_words(block):
    with pytest.raises(ConfigurationError, match=r"onebit: block must be a multiple of 64, got "):
        OneBit(block=block)


@pytest.mark.parametrize(
    ("block", "numel", "expected"),
    [(64, 0, 0), (64, 1, 16), (64, 64, 16), (64, 65, 24), (64, 128, 24), (1024, 1024, 136), (1024, 2049, 280)],
)
def test_bytes(block, numel, expected):
    """Words of 64 signs, then magnitudes of 4 bytes in pairs."""
    assert OneBit(block=block).packed_bytes(numel) == expected


def test_a_bit_an_element_and_a_little():
    assert OneBit().wire_bytes_per_element(4) == 1 / 8 + 4 / 1024
    assert OneBit(block=4096).wire_bytes_per_element(8) == 1 / 8 + 4 / 4096


def test_what_is_sent_is_what_the_oracle_says():
    array = np.random.default_rng(0).standard_t(3, 3000)
    compressor, sent = OneBit(block=128), np.empty(3000)
    compressor.pack(array, np.empty(compressor.packed_bytes(3000), np.uint8), sent, 0)
    np.testing.assert_allclose(sent, scaled_signs(array, 128), rtol=1.2e-7)


def test_layers_of_different_size_have_magnitudes_of_their_own():
    array = np.concatenate([np.full(1024, 1e-6), np.full(1024, -5.0), np.full(10, 3.0)])
    compressor, sent = OneBit(), np.empty(array.size)
    assert compressor.pack(array, np.empty(compressor.packed_bytes(array.size), np.uint8), sent, 0) < 1e-12
    np.testing.assert_allclose(sent, array, rtol=1e-7)


def test_it_is_carried_in_two_phases_and_by_nothing_that_sums():
    assert fitting(OneBit)[0] == "two-phase"
    fits = r"onebit: does not fit collective 'allreduce'.*use two-phase, packed-allgather or "
    with pytest.raises(IncompatiblePairError, match=fits):
        mpicomp.Reducer(OneBit(), "allreduce", comm=Ranks(1).world.transports[0])


def test_zeros_stay_zeros():
    together = Ranks(3, "onebit", "two-phase")
    for _ in range(3):
        means = together.reduce([{"w": np.zeros(500, np.float32)}] * 3)
        assert not any(mean["w"].any() for mean in means)
    assert together.reducers[0].last_step.buckets[0].gain == 1
    assert not together.residual_sum("w").any()
