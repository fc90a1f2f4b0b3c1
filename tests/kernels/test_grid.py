import math

import numpy as np
import pytest
from device.kinds import with_specials
from marks import slow
from mpicomp.kernels import gpu
from mpicomp.kernels.cpu.bit_planes import read_planes, write_planes

# Sizes around a word, a bucket and several of them, and the length of a bucket.
CUTS = [
    (0, 64),
    (1, 128),
    (63, 64),
    (64, 64),
    (65, 2048),
    (127, 128),
    (128, 128),
    (1000, 64),
    (1025, 128),
    (5000, 2048),
]
SYMMETRIC = [(bits, norm) for bits in range(2, 9) for norm in ("max", "l2")]
KEY = 0x123456789ABCDEF
LARGEST = float(np.finfo(np.float32).max)


def pack(kernels, array, bucket, bits, norm, key=None):
    """Rubbish first: every word and every number has to be written."""
    buckets = -(-array.size // bucket)
    words = np.full(bits * -(-array.size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
    bases, steps = np.full((2, buckets), np.nan, np.float32)
    sent = np.full_like(array, np.nan)
    if norm == "range":
        lost = kernels.pack_range(array, bucket, bits, bases, steps, words, sent, key)
        return bases, steps, words, sent, lost
    return None, steps, words, sent, kernels.pack_grid(array, bucket, bits, norm, steps, words, sent, key)


def codes_of(words, bits, size):
    planes = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, bits, 64)
    assert not planes.transpose(0, 2, 1).reshape(-1, bits)[size:].any(), "bits after the last element"
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


def made(size, dtype):
    rng = np.random.default_rng(size)
    array = rng.standard_t(3, size) * np.repeat(10.0 ** rng.integers(-4, 4, size // 64 + 1), 64)[:size]
    array[::7] = 0
    array[1::14] = -0.0
    return array.astype(dtype)


FAST = [(2, "max"), (5, "max"), (8, "max"), (3, "l2"), (8, "l2"), (1, "range"), (4, "range"), (8, "range")]
KINDS = [*SYMMETRIC, *[(bits, "range") for bits in range(1, 9)]]
KINDS = [kind if kind in FAST else slow(*kind) for kind in KINDS]


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(("bits", "norm"), KINDS)
def test_elements_go_to_a_neighboring_point(kernels, dtype, key, bits, norm):
    for size, bucket in CUTS:
        array, kernels.shift = made(size, dtype), size % 2
        bases, steps, words, sent, lost = pack(kernels, array, bucket, bits, norm, key)
        codes = codes_of(words, bits, array.size)
        for number, (least, step, most) in enumerate(grids(array, bucket, bits, norm)):
            part = slice(number * bucket, (number + 1) * bucket)
            np.testing.assert_allclose(steps[number], step, rtol=2e-7, atol=1e-7 * abs(least) * (bases is not None))
            if bases is not None:
                np.testing.assert_allclose(bases[number], least, rtol=1e-7)
            assert codes[part].max() <= most
            room = 1e-6 * most * step + 1e-7 * abs(least)
            np.testing.assert_allclose(sent[part], least + codes[part] * step, rtol=0, atol=room)
            off = np.abs(sent[part].astype(np.float64) - array[part])
            assert off.max() <= step * ((0.5 if key is None else 1) + 1e-6 * most) + 1e-6 * abs(least)
        np.testing.assert_allclose(lost, np.square(array.astype(np.float64) - sent).sum(), rtol=1e-6)


@pytest.mark.parametrize(("bits", "norm"), KINDS)
def test_grids_decode_to_what_was_sent_to_the_bit(kernels, dtype, bits, norm):
    """NumPy rounds products and sums one by one, on every host."""
    offset = 0 if norm == "range" else 2 ** (bits - 1) - 1
    for bucket in (64, 2048):
        array = made(5000, dtype)
        bases, steps, words, sent, _ = pack(kernels, array, bucket, bits, norm, KEY)
        places = (codes_of(words, bits, array.size) - offset).astype(dtype)
        whole = np.zeros_like(steps) if bases is None else bases
        base, step = (np.repeat(numbers, bucket)[: array.size].astype(dtype) for numbers in (whole, steps))
        product = places * step
        np.testing.assert_array_equal(sent, base + product)
        out = np.full(array.size, np.nan, dtype)
        kernels.unpack_grid(bases, steps, words, bucket, bits, out)
        assert out.tobytes() == sent.tobytes()

        factor = 1 / 3
        total = np.random.default_rng(0).normal(size=array.size).astype(dtype)
        base, step = (
            np.repeat((factor * numbers.astype(np.float64)).astype(dtype), bucket)[: array.size]
            for numbers in (whole, steps)
        )
        product = places * step
        expected = total + (base + product)
        kernels.unpack_grid_add(bases, steps, words, bucket, bits, factor, total)
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", [None, KEY])
def test_zeros_and_equal_elements_lose_nothing(kernels, dtype, norm, key):
    array = np.zeros(300, dtype)
    array[::3] = -0.0
    if norm != "l2":
        array[128:256] = 0.3
    steps, sent = pack(kernels, array, 128, 4, norm, key)[1:4:2]
    assert steps[0] == steps[2] == 0
    np.testing.assert_allclose(sent, array, rtol=2e-7, atol=0)


@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nonfinite_elements_spoil_their_bucket(kernels, dtype, norm, key, bad):
    array = made(1000, dtype)
    array[700] = bad
    _, steps, _, sent, lost = pack(kernels, array, 256, 3, norm, key)
    assert np.isnan(steps).tolist() == [False, False, True, False]
    assert np.flatnonzero(np.isnan(sent)).tolist() == list(range(512, 768))
    assert np.isfinite(sent).sum() == 1000 - 256
    assert not np.isfinite(lost)


@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 1e-38, 3e38])
def test_no_size_of_numbers_loses_more_than_there_is(kernels, dtype, norm, key, size):
    rng = np.random.default_rng(0)
    array = (size * rng.uniform(-1, 1, 512)).astype(dtype)
    array[:64] = size
    _, steps, _, sent, lost = pack(kernels, array, 64, 8, norm, key)
    assert np.isfinite(steps).all()
    assert np.isfinite(sent).all()
    energy = np.square(array.astype(np.float64)).sum()
    assert lost <= energy * (1 + 1e-12)
    assert lost == pytest.approx(np.square(array.astype(np.float64) - sent).sum(), rel=1e-6, abs=1e-100)
    if size > 1e-37 and norm != "range":
        assert lost < energy / 4


@pytest.mark.parametrize("norm", ["max", "l2", "range"])
def test_numbers_beyond_float32_saturate(kernels, norm):
    array = np.full(128, -1e308)
    array[::2] = 1e308
    array[64:] = 3.0
    _, steps, _, sent, _ = pack(kernels, array, 64, 4, norm)
    assert np.isfinite(steps).all()
    assert np.abs(sent[:64]).max() <= LARGEST
    if norm == "max":
        np.testing.assert_allclose(np.abs(sent[:64]), LARGEST, rtol=1e-6)
        np.testing.assert_array_equal(np.sign(sent[:64]), np.sign(array[:64]))
        np.testing.assert_allclose(sent[64:], 3, rtol=1e-6)


@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", [None, KEY])
def test_grids_of_all_kinds_of_numbers_have_the_hosts_bits(gpu_kernels, dtype, norm, key):
    """The fixture compares them."""
    array = with_specials(made(5000, dtype))
    bases, steps, words, _, _ = pack(gpu_kernels, array, 64, 4, norm, key)
    assert 5 < np.isnan(steps).sum() < steps.size - 5
    out, total = np.empty_like(array), np.random.default_rng(0).normal(size=5000).astype(dtype)
    gpu_kernels.unpack_grid(bases, steps, words, 64, 4, out)
    gpu_kernels.unpack_grid_add(bases, steps, words, 64, 4, 1 / 3, total)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 1e-38, 1e-36])
def test_grids_are_read_equally_where_subnormals_are_zero(place, dtype, norm, size):
    """CuPy has kernels treat them so. What is not sent stays with the sender, whatever receivers decode."""
    array = (size * np.random.default_rng(0).uniform(-1, 1, 512)).astype(dtype)
    words, sent, out = place.empty(4 * 8, np.uint64), place.empty(512, dtype), place.empty(512, dtype)
    bases, steps = (place.empty(8, np.float32) for _ in range(2))
    with place.flushing():
        if norm == "range":
            gpu.pack_range(place.put(array), 64, 4, bases, steps, words, sent, 1)
        else:
            gpu.pack_grid(place.put(array), 64, 4, norm, steps, words, sent, 1)
        gpu.unpack_grid(bases if norm == "range" else None, steps, words, 64, 4, out)
    np.testing.assert_array_equal(out.get(), sent.get())
    assert np.abs(array - out.get()).max() <= 2 * np.abs(array).max()


@pytest.mark.parametrize("planes", range(1, 9))
@pytest.mark.parametrize("groups", [0, 1, 2, 16])
def test_planes_are_what_the_definition_says_and_are_read_back(planes, groups):
    codes = np.random.default_rng(planes).integers(0, 1 << planes, 64 * groups).astype(np.uint8)
    words = np.full(planes * groups, 0xDEADBEEFDEADBEEF, np.uint64)
    write_planes(codes, groups, planes, words, 0)
    expected = [
        sum((int(code) >> plane & 1) << place for place, code in enumerate(codes[64 * group : 64 * group + 64]))
        for group in range(groups)
        for plane in range(planes)
    ]
    assert words.tolist() == expected
    back = np.full(64 * groups + 5, 99, np.uint8)
    read_planes(words, 0, groups, planes, back)
    assert back[: 64 * groups].tolist() == codes.tolist()
    assert (back[64 * groups :] == 99).all()
