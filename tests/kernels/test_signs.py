import itertools

import numpy as np
import pytest
from device import emulator
from mpicomp.kernels import gpu

SIZES = [0, 1, 63, 64, 65, 127, 128, 191, 256, 1000, 5000]


def bits_of(words, size):
    """Return the bits of elements; those after the last one must be zero."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[size:].any()
    return bits[:size]


def pack(kernels, array, block, sent=None):
    # Rubbish first: every word and every scale has to be written.
    scales = np.full(-(-array.size // block), np.nan, np.float32)
    words = np.full(-(-array.size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
    lost = kernels.pack_signs(array, block, scales, words, sent)
    return scales, words, lost


def laplace(size, dtype):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[::5] = 0
    array[1::10] = -0.0
    return array


def slowly(array, block):
    """Scales, bits and elements as sent, from the definition."""
    parts = [array[start : start + block].astype(np.float64) for start in range(0, array.size, block)]
    scales = np.array([np.abs(part).sum() / part.size for part in parts]).astype(np.float32)
    bits = np.signbit(array)
    sent = np.where(bits, -1.0, 1.0) * np.repeat(scales, block)[: array.size]
    return scales, bits, sent.astype(array.dtype)


@pytest.mark.parametrize("block", [64, 192, 1024])
@pytest.mark.parametrize("shift", [0, 1])
def test_signs_of_any_size_are_packed_by_definition(kernels, dtype, block, shift):
    kernels.shift = shift
    for size in SIZES:
        array, sent = laplace(size, dtype), np.full(size, np.nan, dtype)
        scales, words, lost = pack(kernels, array, block, sent)
        expected_scales, bits, expected_sent = slowly(array, block)
        np.testing.assert_allclose(scales, expected_scales, rtol=1.2e-7)
        np.testing.assert_array_equal(bits_of(words, size), bits)
        np.testing.assert_allclose(sent, expected_sent, rtol=1.2e-7)
        missed = np.square(array.astype(np.float64) - sent).sum()
        np.testing.assert_allclose(lost, missed, rtol=1e-6)
        assert missed <= np.square(array.astype(np.float64)).sum()


@pytest.mark.parametrize("shift", [0, 1])
def test_signs_unpack_to_what_was_sent(kernels, dtype, shift):
    kernels.shift = shift
    for size in SIZES:
        array, sent, out = laplace(size, dtype), np.empty(size, dtype), np.full(size, np.nan, dtype)
        scales, words, _ = pack(kernels, array, 128, sent)
        kernels.unpack_signs(scales, words, 128, out)
        assert out.tobytes() == sent.tobytes()
        total = np.arange(size).astype(dtype)
        expected = total + dtype(0.25) * sent
        kernels.unpack_signs_add(scales[None], words[None], 128, 0.25, total)
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("block", [64, 192, 5056])
def test_signs_of_rows_are_added_in_their_order(kernels, dtype, rows, block):
    for size in SIZES:
        blocks, words = -(-size // block), -(-size // 64)
        messages = np.zeros((rows, 8 * (words + -(-blocks // 2))), np.uint8)  # rows that do not follow each other
        scales, signs = messages[:, 8 * words :].view(np.float32)[:, :blocks], messages[:, : 8 * words].view(np.uint64)
        total = np.arange(size).astype(dtype)
        expected = total.copy()
        for row in range(rows):
            sent = np.empty(size, dtype)
            kernels.pack_signs(laplace(size + row, dtype)[:size], block, scales[row], signs[row], sent)
            expected += (0.25 * sent.astype(np.float64)).astype(dtype)
        kernels.unpack_signs_add(scales, signs, block, 0.25, total)
        assert total.tobytes() == expected.tobytes()
        fresh, zeros = np.full(size, np.nan, dtype), np.zeros(size, dtype)
        kernels.unpack_signs_add(scales, signs, block, 0.25, fresh, True)
        kernels.unpack_signs_add(scales, signs, block, 0.25, zeros)
        assert fresh.tobytes() == zeros.tobytes()


@pytest.mark.parametrize("shift", [0, 1])
def test_signs_packed_in_place_leave_the_rest(kernels, dtype, shift):
    kernels.shift = shift
    for size in SIZES:
        array, sent = laplace(size, dtype), np.empty(size, dtype)
        scales, words, lost = pack(kernels, array, 192, sent)
        left, scales_in_place, words_in_place = array.copy(), np.full_like(scales, np.nan), np.full_like(words, 77)
        assert kernels.pack_signs_in_place(left, 192, scales_in_place, words_in_place) == lost
        assert (scales_in_place.tobytes(), words_in_place.tobytes()) == (scales.tobytes(), words.tobytes())
        assert left.tobytes() == (array - sent).tobytes()


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("kinds", ["f", "fff", "hfb"])
def test_signs_of_a_sum_are_packed_in_one_launch(place, kinds, factor):
    """Pieces, some of them empty or of 16 bits, times a factor, plus a residual: as by definition."""
    for size, block in itertools.product(SIZES, (64, 192, 5056)):
        rng, residual = np.random.default_rng(size), laplace(size, np.float32)
        bounds = [0, *sorted(rng.integers(0, size + 1, len(kinds) - 1)), size]
        pieces, parts = [], []
        for kind, (start, stop) in zip(kinds, itertools.pairwise(bounds), strict=True):
            part = laplace(size, np.float32)[start:stop]
            if kind == "b":
                part = (part.view(np.uint32) & 0xFFFF0000).view(np.float32)
            pieces.append(part.astype(np.float16) if kind == "h" else part)
            parts.append(pieces[-1].astype(np.float32))
            if kind == "b":
                pieces[-1] = (part.view(np.uint32) >> 16).astype(np.uint16)
        for memory in (None, residual):
            total = np.concatenate(parts) * np.float32(factor)
            total = total if memory is None else total + memory
            expected_scales, bits, _ = slowly(total, block)
            there, out = [place.put(piece) for piece in pieces], place.empty(size, np.float32)
            scales, words = place.empty(-(-size // block), np.float32), place.empty(-(-size // 64), np.uint64)
            gradient = there[0] if kinds == "f" else gpu.table_of(there, out, None)
            held = None if memory is None else place.put(memory)
            emulator.launches.clear()
            with place.quiet():
                made = gpu.accumulate_signs(gradient, factor, held, out, block, scales, words)
            assert not place.emulated or emulator.launches == ["pack_signs"]
            np.testing.assert_allclose(scales.get(), expected_scales, rtol=1.2e-7)
            np.testing.assert_array_equal(bits_of(words.get(), size), bits)
            sent = np.where(bits, -1, 1).astype(np.float32) * np.repeat(scales.get(), block)[:size]
            np.testing.assert_array_equal(out.get(), total - sent)
            wide = total.astype(np.float64)
            lost = np.square(wide - sent).sum()
            np.testing.assert_allclose(made.lost.item(), lost, rtol=1e-6)
            moments = [np.count_nonzero(total), np.abs(wide).sum(), np.square(wide).sum()]
            found = [made.nonzero.item(), made.total.item(), made.energy.item()]
            np.testing.assert_allclose(found, moments, rtol=1e-12)
            assert made.finite.item()


def test_signs_of_zeros_are_zeros(kernels, dtype):
    array, sent = np.zeros(300, dtype), np.empty(300, dtype)
    array[:64] = -0.0
    array[256] = 2
    scales, _, lost = pack(kernels, array, 64, sent)
    assert scales.tolist() == [0, 0, 0, 0, np.float32(2 / 44)]
    assert not sent[:256].any()
    assert lost == pytest.approx(4 - 4 / 44)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_signs_of_nonfinite_elements_spoil_their_block(kernels, dtype, bad):
    array, sent = np.ones(1000, dtype), np.empty(1000, dtype)
    array[700] = bad
    scales, _, lost = pack(kernels, array, 256, sent)
    assert np.isfinite(scales).tolist() == [True, True, False, True]
    assert np.isfinite(sent).sum() == 1000 - 256
    assert not np.isfinite(lost)


def test_signs_of_large_float64_saturate(kernels):
    largest = np.finfo(np.float32).max
    array, sent = np.full(128, -1e308), np.empty(128)  # their sum is beyond float64, and each beyond float32
    array[64:] = 3.0
    scales, _, _ = pack(kernels, array, 64, sent)
    assert scales.tolist() == [largest, 3]
    assert (sent[:64] == -float(largest)).all()


def test_votes_are_sign_bits(kernels, dtype):
    for size in (*SIZES, 30_011):
        array = np.random.default_rng(size).normal(size=size).astype(dtype)
        array[::5] = 0
        words = np.full(-(-size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
        kernels.pack_votes(array, words)
        np.testing.assert_array_equal(bits_of(words, size), array < 0)
        out = np.full(size, np.nan, dtype)
        kernels.unpack_votes(words, 0.1, out)
        np.testing.assert_array_equal(out, np.where(array < 0, -dtype(0.1), dtype(0.1)))
