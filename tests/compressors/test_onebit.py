import numpy as np
from oracle import scaled_signs

from mpicomp import OneBit


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
