"""Signs and exponents are those of `mpicomp.kernels.cpu`, bit for bit: in an emulation on the host, and on a GPU."""

import numpy as np
import pytest
from gpu.alike import assert_alike, with_specials
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
SIZES = [0, 1, 31, 32, 33, 63, 64, 65, 255, 257, 1000, 1025, 5000]


def made(size, dtype):
    rng = np.random.default_rng(size)
    array = rng.laplace(size=size) * 10.0 ** rng.integers(-36, 36, size)
    array[::9] = 2.0 ** rng.integers(-20, 20, array[::9].size)
    array[1::9] = -0.0
    return array.astype(dtype)


def packed_by_the_host(array, key):
    words = np.full(-(-array.size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
    exponents, sent = np.full(array.size, 99, np.uint8), np.empty_like(array)
    with np.errstate(all="ignore"):
        return words, exponents, sent, cpu.pack_exponents(array, words, exponents, sent, key)


def assert_same_messages(place, array, key):
    words, exponents, sent, lost = packed_by_the_host(array, key)
    there = place.put(np.full(words.size, 0xDEADBEEFDEADBEEF, np.uint64)), place.empty(array.size, np.uint8)
    far, there_sent = place.put(array), place.empty(array.size, array.dtype)
    with place.quiet():
        there_lost = gpu.pack_exponents(far, *there, there_sent, key)
    np.testing.assert_array_equal(there[0].get(), words)
    np.testing.assert_array_equal(there[1].get(), exponents)
    assert_alike(there_sent, sent)
    np.testing.assert_allclose(there_lost.item(), lost, rtol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", [0, 0x123456789ABCDEF])
def test_messages(place, dtype, size, key):
    assert_same_messages(place, made(size, dtype), key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_of_numbers_of_all_kinds(place, dtype):
    assert_same_messages(place, with_specials(made(5000, dtype)), 3)
    with np.errstate(over="ignore"):
        for size in (1e-45, 1e-40, 2.0**-126, 3.3e38, 1e300):
            # One by one: what is lost of large numbers would hide what is lost of small ones.
            array = np.full(300, size).astype(dtype)
            array[::3] *= -1
            assert_same_messages(place, place.seen(array), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_what_the_host_packs_is_unpacked(place, dtype, size):
    array = made(size, dtype)
    if size > 200:
        array = with_specials(array)
    words, exponents, sent, _ = packed_by_the_host(array, 7)
    total = np.random.default_rng(size).normal(size=size).astype(dtype)
    there, out, there_total = (place.put(words), place.put(exponents)), place.empty(size, dtype), place.put(total)
    with place.quiet():
        gpu.unpack_exponents(*there, out)
        gpu.unpack_exponents_add(*there, 0.3, there_total)
    assert_alike(out, sent)
    with np.errstate(all="ignore"):
        cpu.unpack_exponents_add(words, exponents, 0.3, total)
    assert_alike(there_total, total)
