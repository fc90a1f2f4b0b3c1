"""Parts of a bucket that have quantisers of their own, in whatever pieces the bucket is packed."""

import numpy as np
import pytest

import mpicomp
from mpicomp.compressors.packing import packers

NAMES, SIZES = ["wide.weight", "wide.bias", "narrow.weight", "nothing"], [300, 7, 200, 0]
NUMEL = sum(SIZES)


def nearest(array, bits, bucket):
    """Round to multiples of a bucket's largest magnitude over s."""
    out = np.empty_like(array)
    for start in range(0, array.size, bucket):
        own = array[start : start + bucket].astype(np.float64)
        step = np.float32(np.abs(own).max() / (2 ** (bits - 1) - 1))
        out[start : start + bucket] = step * np.round(own / step)
    return out


def message_of(packer, array, key=1):
    message, sent = np.zeros(packer.packed_bytes, np.uint8), np.empty_like(array)
    lost = packer.pack(array, message, sent, key)
    np.testing.assert_allclose(lost, np.square((array - sent).astype(np.float64)).sum(), rtol=1e-5)
    received = np.full_like(array, np.nan)
    packer.unpack(message, received)
    assert received.tobytes() == sent.tobytes()
    added = array.copy()
    packer.unpack_add(message, 0.5, added)
    np.testing.assert_allclose(added, array + 0.5 * sent, rtol=1e-6, atol=1e-6)
    return sent


@pytest.mark.parametrize("pieces", [[NUMEL], [254, 253], [301, 6, 200, 0], [1] * NUMEL], ids=len)
def test_each_part_of_a_piece_has_its_bits(pieces):
    compressor = mpicomp.QSGD(bits=3, bucket=64, rounding="nearest", layers={"wide.*": 6}).bind(NAMES, SIZES)
    array = np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)
    bits = np.repeat([6, 3], [307, 200])
    start = 0
    for packer, size in zip(packers(compressor, pieces), pieces, strict=True):
        own, own_bits = array[start : start + size], bits[start : start + size]
        expected = np.concatenate([nearest(own[own_bits == b], b, 64) for b in (6, 3)])
        np.testing.assert_allclose(message_of(packer, own), expected, rtol=1e-5, atol=1e-6)
        start += size


def test_efsign_has_a_magnitude_for_each_layer():
    compressor = mpicomp.EFSign().bind(NAMES, SIZES)
    array = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32) * np.repeat([1, 50, 3, 1], SIZES)
    [packer] = packers(compressor, [NUMEL])
    parts = np.split(array, np.cumsum(SIZES)[:-1])
    expected = np.concatenate([np.where(part < 0, -1, 1) * np.abs(part).mean() for part in parts if part.size])
    np.testing.assert_allclose(message_of(packer, array), expected, rtol=1e-5)


def test_parts_draw_other_numbers():
    compressor = mpicomp.QSGD(bits=2, bucket=64, layers={"wide.bias": 3}).bind(["a", "wide.bias", "c"], [64, 64, 64])
    [packer] = packers(compressor, [192])
    sent = message_of(packer, np.tile(np.linspace(-1, 1, 64, dtype=np.float32), 3))
    assert sent[:64].tolist() != sent[128:].tolist()


def test_another_array_than_the_bucket_is_packed_as_a_whole():
    compressor = mpicomp.Uniform(bits=4, layers={"wide.*": 6}).bind(NAMES, SIZES)
    [packer] = packers(compressor, [100])
    assert packer.packed_bytes == mpicomp.Uniform(bits=4).packed_bytes(100)


def test_feedback_needs_all_layers_to_contract():
    assert mpicomp.Uniform(bits=8, bucket=64, layers={"a": 4}).feedback
    assert not mpicomp.Uniform(bits=8, bucket=64, layers={"a": 2}).feedback
