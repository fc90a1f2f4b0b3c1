import numpy as np
import pytest
from marks import slow
from mpicomp.kernels import cpu

DTYPES = [np.float32, slow(np.float64)]
SIZES = [0, 1, 63, 64, 65, 127, 128, 191, 256, 1000, 5000]


def pack(array, block, sent=None):
    # Rubbish first: every word and every scale has to be written.
    scales = np.full(-(-array.size // block), np.nan, np.float32)
    words = np.full(-(-array.size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
    lost = cpu.pack_signs(array, block, scales, words, sent)
    return scales, words, lost


def slowly(array, block):
    """Scales, bits and what is sent, from the definition."""
    parts = [array[start : start + block].astype(np.float64) for start in range(0, array.size, block)]
    scales = np.array([np.abs(part).sum() / part.size for part in parts]).astype(np.float32)
    bits = np.signbit(array)
    sent = np.where(bits, -1.0, 1.0) * np.repeat(scales, block)[: array.size]
    return scales, bits, sent.astype(array.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [64, 128, 1024])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_packing_is_what_the_definition_says(dtype, block, size, shift):
    array = np.random.default_rng(size).laplace(size=size + shift).astype(dtype)[shift:]
    array[::5] = 0
    array[1::10] = -0.0
    sent = np.full(size + shift, np.nan, dtype)[shift:]
    scales, words, lost = pack(array, block, sent)
    expected_scales, bits, expected_sent = slowly(array, block)
    np.testing.assert_allclose(scales, expected_scales, rtol=1.2e-7)
    unpacked = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
    np.testing.assert_array_equal(unpacked[:size], bits)
    assert not unpacked[size:].any()
    np.testing.assert_allclose(sent, expected_sent, rtol=1.2e-7)
    missed = np.square(array.astype(np.float64) - sent).sum()
    np.testing.assert_allclose(lost, missed, rtol=1e-6)
    assert missed <= np.square(array.astype(np.float64)).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_unpacking_gives_what_was_sent(dtype, size, shift):
    array = np.random.default_rng(size).normal(size=size).astype(dtype)
    sent = np.empty(size, dtype)
    scales, words, _ = pack(array, 128, sent)
    out = np.full(size + shift, np.nan, dtype)[shift:]
    cpu.unpack_signs(scales, words, 128, out)
    assert out.tobytes() == sent.tobytes()
    total = np.arange(size + shift).astype(dtype)[shift:]
    expected = total + dtype(0.25) * sent
    cpu.unpack_signs_add(scales, words, 128, 0.25, total)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_zeros_is_zeros(dtype):
    array = np.zeros(300, dtype)
    array[:64] = -0.0
    array[256] = 2
    sent = np.empty(300, dtype)
    scales, _, lost = pack(array, 64, sent)
    assert scales.tolist() == [0, 0, 0, 0, np.float32(2 / 44)]
    assert not sent[:256].any()
    assert lost == pytest.approx(4 - 4 / 44)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_magnitudes_lose_nothing(dtype):
    array = np.where(np.arange(1000) % 3 == 0, 0.5, -0.5).astype(dtype)
    sent = np.empty(1000, dtype)
    assert pack(array, 256, sent)[2] == 0
    np.testing.assert_array_equal(sent, array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(dtype, bad):
    array = np.ones(1000, dtype)
    array[700] = bad
    sent = np.empty(1000, dtype)
    scales, _, lost = pack(array, 256, sent)
    assert np.isfinite(scales).tolist() == [True, True, False, True]
    assert np.isfinite(sent).sum() == 1000 - 256
    assert not np.isfinite(lost)


def test_large_float64_saturate():
    largest = np.finfo(np.float32).max
    array = np.full(128, -1e308)  # their sum is beyond float64, and each beyond float32
    array[64:] = 3.0
    sent = np.empty(128)
    scales, _, _ = pack(array, 64, sent)
    assert scales.tolist() == [largest, 3]
    assert (sent[:64] == -float(largest)).all()


def test_sent_is_optional():
    scales, words, lost = pack(np.array([1, -3, 2], np.float32), 64)
    assert (scales.tolist(), words.tolist(), lost) == ([2], [2], 2.0)
