import math

import numpy as np
import pytest
from marks import slow
from mpicomp.kernels import cpu

DTYPES = [np.float32, slow(np.float64)]
SIZES = [0, 1, 63, 64, 65, 127, 128, 1000, 1024, 1025, 5000]
SYMMETRIC = [(bits, norm) for bits in range(2, 9) for norm in ("max", "l2")]
KEY = 0x123456789ABCDEF
LARGEST = float(np.finfo(np.float32).max)


def pack(array, bucket, bits, norm, key=None):
    """Rubbish first: every word and every number has to be written."""
    buckets = -(-array.size // bucket)
    words = np.full(bits * -(-array.size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
    bases, steps = np.full((2, buckets), np.nan, np.float32)
    sent = np.full_like(array, np.nan)
    if norm == "range":
        lost = cpu.pack_range(array, bucket, bits, bases, steps, words, sent, key)
        return bases, steps, words, sent, lost
    return None, steps, words, sent, cpu.pack_grid(array, bucket, bits, norm, steps, words, sent, key)


def codes_of(words, bits, size):
    planes = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, bits, 64)
    assert not planes.transpose(0, 2, 1).reshape(-1, bits)[size:].any(), "bits behind the last element"
    return (planes * (1 << np.arange(bits))[:, np.newaxis]).sum(axis=1).ravel()[:size]


def grids(array, bucket, bits, norm):
    """Least point, step and number of steps of each bucket, in float64, from the definition."""
    for start in range(0, array.size, bucket):
        part = [float(value) for value in array[start : start + bucket]]
        if norm == "range":
            steps = 2**bits - 1
            yield min(part), (max(part) - min(part)) / steps, steps
        else:
            points = 2 ** (bits - 1) - 1
            size = max(map(abs, part)) if norm == "max" else math.sqrt(sum(value * value for value in part))
            yield -size, size / points, 2 * points


def made(size, dtype, shift=0):
    rng = np.random.default_rng(size)
    array = rng.standard_t(3, size + shift) * np.repeat(10.0 ** rng.integers(-4, 4, size // 64 + 1), 64)[: size + shift]
    array[::7] = 0
    array[1::14] = -0.0
    return array.astype(dtype)[shift:]


KINDS = [*SYMMETRIC, *[(bits, "range") for bits in range(1, 9)]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(("bits", "norm"), KINDS)
def test_elements_go_to_a_point_beside_them(dtype, key, bits, norm):
    for size in SIZES:
        for bucket in (64, 128, 2048):
            array = made(size, dtype, shift=size % 2)
            bases, steps, words, sent, lost = pack(array, bucket, bits, norm, key)
            codes = codes_of(words, bits, array.size)
            for number, (least, step, most) in enumerate(grids(array, bucket, bits, norm)):
                own = slice(number * bucket, (number + 1) * bucket)
                np.testing.assert_allclose(steps[number], step, rtol=2e-7, atol=1e-7 * abs(least) * (bases is not None))
                if bases is not None:
                    np.testing.assert_allclose(bases[number], least, rtol=1e-7)
                assert codes[own].max() <= most
                np.testing.assert_allclose(
                    sent[own], least + codes[own] * step, rtol=0, atol=1e-6 * most * step + 1e-7 * abs(least)
                )
                off = np.abs(sent[own].astype(np.float64) - array[own])
                assert off.max() <= step * ((0.5 if key is None else 1) + 1e-6 * most) + 1e-6 * abs(least)
            np.testing.assert_allclose(lost, np.square(array.astype(np.float64) - sent).sum(), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "norm"), KINDS)
def test_the_receiver_sees_what_the_sender_has_worked_out_rounded_twice(dtype, bits, norm):
    """NumPy rounds products and sums one by one, on every host."""
    offset = 0 if norm == "range" else 2 ** (bits - 1) - 1
    for bucket in (64, 2048):
        array = made(5000, dtype)
        bases, steps, words, sent, _ = pack(array, bucket, bits, norm, KEY)
        places = (codes_of(words, bits, array.size) - offset).astype(dtype)
        whole = np.zeros_like(steps) if bases is None else bases
        base, step = (np.repeat(numbers, bucket)[: array.size].astype(dtype) for numbers in (whole, steps))
        product = places * step
        np.testing.assert_array_equal(sent, base + product)
        out = np.full(array.size + 1, np.nan, dtype)[1:]
        cpu.unpack_grid(bases, steps, words, bucket, bits, out)
        assert out.tobytes() == sent.tobytes()

        factor = 1 / 3
        total = np.random.default_rng(0).normal(size=array.size).astype(dtype)
        base, step = (
            np.repeat((factor * numbers.astype(np.float64)).astype(dtype), bucket)[: array.size]
            for numbers in (whole, steps)
        )
        product = places * step
        expected = total + (base + product)
        cpu.unpack_grid_add(bases, steps, words, bucket, bits, factor, total)
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "norm"), [(2, "max"), (4, "l2"), (8, "max"), (1, "range"), (8, "range")])
def test_random_rounding_is_right_on_the_average(dtype, bits, norm):
    array = made(4096, dtype)
    sent = np.array([pack(array, 128, bits, norm, key)[3] for key in range(300)], np.float64)
    error = (sent - array).reshape(300, -1, 128).mean(axis=2)
    bound = 4 * error.std(axis=0) / np.sqrt(300) + 1e-7 * np.abs(array).reshape(-1, 128).max(axis=1)
    assert (np.abs(error.mean(axis=0)) <= bound).all()
    towards = (np.sign(array) * (sent - array)).reshape(300, -1, 128).mean(axis=2)
    bound = 4 * towards.std(axis=0) / np.sqrt(300) + 1e-7 * np.abs(array).reshape(-1, 128).max(axis=1)
    assert (np.abs(towards.mean(axis=0)) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_element_is_sent_and_so_are_both_ends(dtype):
    array = made(1000, dtype)
    for key in (None, KEY):
        sent = pack(array, 128, 4, "max", key)[3]
        between = pack(array, 128, 4, "range", key)[3]
        for start in range(0, 1000, 128):
            part = slice(start, start + 128)
            places = [start + int(np.abs(array[part]).argmax())]
            np.testing.assert_allclose(sent[places], array[places], rtol=2e-7)
            places = [start + int(array[part].argmin()), start + int(array[part].argmax())]
            room = 4e-7 * np.abs(array[part]).max()
            np.testing.assert_allclose(between[places], array[places], rtol=0, atol=room)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", [None, KEY])
def test_zeros_and_equal_elements_lose_nothing(dtype, norm, key):
    array = np.zeros(300, dtype)
    array[::3] = -0.0
    if norm != "l2":
        array[128:256] = 0.3
    steps, sent = pack(array, 128, 4, norm, key)[1:4:2]
    assert steps[0] == steps[2] == 0
    np.testing.assert_allclose(sent, array, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_bucket_and_no_other(dtype, norm, key, bad):
    array = made(1000, dtype)
    array[700] = bad
    _, steps, _, sent, lost = pack(array, 256, 3, norm, key)
    assert np.isnan(steps).tolist() == [False, False, True, False]
    assert np.flatnonzero(np.isnan(sent)).tolist() == list(range(512, 768))
    assert np.isfinite(sent).sum() == 1000 - 256
    assert not np.isfinite(lost)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 3e38])
def test_no_size_of_numbers_loses_more_than_there_is(dtype, norm, key, size):
    rng = np.random.default_rng(0)
    array = (size * rng.uniform(-1, 1, 512)).astype(dtype)
    array[:64] = size
    _, steps, _, sent, lost = pack(array, 64, 8, norm, key)
    assert np.isfinite(steps).all()
    assert np.isfinite(sent).all()
    energy = np.square(array.astype(np.float64)).sum()
    assert lost <= energy * (1 + 1e-12)
    assert lost == pytest.approx(np.square(array.astype(np.float64) - sent).sum(), rel=1e-6, abs=1e-100)
    if size > 1e-37 and norm != "range":
        assert lost < energy / 4


@pytest.mark.parametrize("norm", ["max", "l2", "range"])
def test_numbers_beyond_float32_saturate(norm):
    array = np.full(128, -1e308)
    array[::2] = 1e308
    array[64:] = 3.0
    _, steps, _, sent, _ = pack(array, 64, 4, norm)
    assert np.isfinite(steps).all()
    assert np.abs(sent[:64]).max() <= LARGEST
    if norm == "max":
        np.testing.assert_allclose(np.abs(sent[:64]), LARGEST, rtol=1e-6)
        np.testing.assert_array_equal(np.sign(sent[:64]), np.sign(array[:64]))
        np.testing.assert_allclose(sent[64:], 3, rtol=1e-6)
