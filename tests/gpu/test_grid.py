"""Codes on grids are those of `mpicomp.kernels.cpu`, bit for bit: in an emulation on the host, and on a GPU."""

import numpy as np
import pytest
from gpu.alike import assert_alike, with_specials
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
# Around half a word of codes, a word, a block of threads, and more than three blocks have in one go.
SIZES = [0, 1, 31, 32, 33, 63, 64, 65, 255, 257, 1000, 5000]
KINDS = [(2, "max"), (5, "max"), (8, "max"), (3, "l2"), (8, "l2"), (1, "range"), (4, "range"), (8, "range")]
KEYS = [None, 0x123456789ABCDEF]


def made(size, dtype):
    """Buckets of all sizes of numbers."""
    rng = np.random.default_rng(size)
    array = rng.standard_t(3, size) * np.repeat(10.0 ** rng.integers(-30, 30, size // 64 + 1), 64)[:size]
    array[::7] = 0
    array[1::14] = -0.0
    return array.astype(dtype)


class Message:
    """Memory for a message, full of rubbish, on the host or on a device."""

    def __init__(self, size, bucket, bits, put):
        buckets = -(-size // bucket)
        self.words = put(np.full(bits * -(-size // 64), 0xDEADBEEFDEADBEEF, np.uint64))
        self.bases = put(np.full(buckets, 3.0, np.float32))
        self.steps = put(np.full(buckets, 3.0, np.float32))


def pack(kernels, array, bucket, bits, norm, message, sent, key):
    if norm == "range":
        parts = message.bases, message.steps, message.words
        return kernels.pack_range(array, bucket, bits, *parts, sent, key)
    return kernels.pack_grid(array, bucket, bits, norm, message.steps, message.words, sent, key)


def assert_same_messages(place, array, bucket, bits, norm, key):
    own, there = (Message(array.size, bucket, bits, put) for put in (np.copy, place.put))
    sent, there_sent = np.empty_like(array), place.empty(array.size, array.dtype)
    with np.errstate(all="ignore"):
        lost = pack(cpu, array, bucket, bits, norm, own, sent, key)
    far = place.put(array)
    with place.quiet():
        there_lost = pack(gpu, far, bucket, bits, norm, there, there_sent, key)
    assert there.bases.get().tobytes() == own.bases.tobytes()
    assert there.steps.get().tobytes() == own.steps.tobytes()
    assert there.words.get().tobytes() == own.words.tobytes()
    assert_alike(there_sent, sent)
    np.testing.assert_allclose(there_lost.item(), lost, rtol=1e-9)
    return own, sent


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "norm"), KINDS)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("bucket", [64, 192, 2048])
def test_messages(place, dtype, bits, norm, key, bucket):
    for size in SIZES:
        assert_same_messages(place, made(size, dtype), bucket, bits, norm, key)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", KEYS)
def test_messages_of_what_is_no_number(place, dtype, norm, key):
    own, _ = assert_same_messages(place, with_specials(made(5000, dtype)), 64, 4, norm, key)
    assert 5 < np.isnan(own.steps).sum() < own.steps.size - 5
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        array = made(300, dtype)
        array[130] = bad
        own, sent = assert_same_messages(place, array, 64, 4, norm, key)
        assert np.flatnonzero(np.isnan(own.steps)).tolist() == [2]
        assert np.isnan(sent).sum() == 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 1e-38, 3e38, 1e300])
def test_messages_of_the_smallest_and_the_largest_numbers(place, dtype, norm, key, size):
    with np.errstate(over="ignore"):
        size = min(dtype(size), np.finfo(dtype).max)
    if place.seen(size) != size:
        pytest.skip("subnormal numbers are zero there: the next test is about them")
    array = (size * np.random.default_rng(0).uniform(-1, 1, 512)).astype(dtype)
    array[:64] = size
    array[64:128] = -size
    array[128:192] = np.abs(array[128:192])
    own, sent = assert_same_messages(place, array, 64, 8, norm, key)
    assert np.isfinite(own.steps).all()
    assert np.isfinite(sent).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 1e-38, 1e-36])
def test_devices_see_what_was_sent_where_subnormal_numbers_are_zero(place, dtype, norm, size):
    """CuPy has them treated so. What is not sent stays with the sender, whatever the receivers make of the message."""
    array = (size * np.random.default_rng(0).uniform(-1, 1, 512)).astype(dtype)
    message, sent, out = Message(512, 64, 4, place.put), place.empty(512, dtype), place.empty(512, dtype)
    with place.flushing():
        pack(gpu, place.put(array), 64, 4, norm, message, sent, 1)
        bases = message.bases if norm == "range" else None
        gpu.unpack_grid(bases, message.steps, message.words, 64, 4, out)
    np.testing.assert_array_equal(out.get(), sent.get())
    assert np.abs(array - out.get()).max() <= 2 * np.abs(array).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["max", "l2", "range"])
def test_messages_of_zeros(place, dtype, norm):
    for signs in ([0.0], [-0.0], [0.0, -0.0], [-0.0, 0.0]):
        array = np.tile(np.array(signs, dtype), 128 // len(signs))
        _, sent = assert_same_messages(place, array, 64, 4, norm, None)
        assert not sent.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "norm"), KINDS)
@pytest.mark.parametrize("bucket", [64, 192, 2048])
def test_what_the_host_packs_is_unpacked(place, dtype, bits, norm, bucket):
    for size in SIZES:
        array, rng = made(size, dtype), np.random.default_rng(size)
        if size > 100:
            array[70] = np.inf
        message, sent = Message(size, bucket, bits, np.copy), np.empty_like(array)
        with np.errstate(all="ignore"):
            pack(cpu, array, bucket, bits, norm, message, sent, 5)
        bases = message.bases if norm == "range" else None
        parts = None if bases is None else place.put(bases), place.put(message.steps), place.put(message.words)
        out, total = place.empty(size, dtype), rng.normal(size=size).astype(dtype)
        there_total = place.put(total)
        with place.quiet():
            gpu.unpack_grid(*parts, bucket, bits, out)
            gpu.unpack_grid_add(*parts, bucket, bits, 1 / 3, there_total)
        assert_alike(out, sent)
        cpu.unpack_grid_add(bases, message.steps, message.words, bucket, bits, 1 / 3, total)
        assert_alike(there_total, total)
