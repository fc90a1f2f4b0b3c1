"""Fields and votes give what `mpicomp.kernels.cpu` gives: in an emulation on the host, and on a GPU."""

import numpy as np
import pytest
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
SIZES = [0, 1, 257, 2600, 30_011]
BAD = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("limit", "ranks"), [(1, 1), (7, 4), (32767, 64)])
@pytest.mark.parametrize("key", [None, 2**40 + 3])
def test_fields(place, dtype, size, limit, ranks, key):
    rng = np.random.default_rng(size)
    array = (2 * rng.uniform(-1.2, 1.2, size)).astype(dtype)
    if size > 100:
        array[:70] = np.array(BAD * 10).astype(dtype)
    largest, grids = 2 * limit * ranks, np.array([1, 4, 16])
    steps = (2 / limit / grids).astype(dtype)
    inverses = (limit * grids / 2).astype(dtype)
    levels = rng.integers(0, 3, size).astype(np.uint8)
    words, sent, out = np.empty(cpu.words_of(size, largest), np.uint64), np.empty(size, dtype), np.empty(size, dtype)
    there = place.empty(words.size, np.uint64), place.empty(size, dtype), place.empty(size, dtype)
    for own in (None, levels):
        lost = cpu.pack_fields(array, inverses, steps, limit, largest, key, words, sent, own)
        cpu.unpack_fields(words, steps, limit, largest, out, own)
        far = None if own is None else place.put(own)
        constants = place.put(inverses), place.put(steps)
        with place.quiet():
            there_lost = gpu.pack_fields(place.put(array), *constants, limit, largest, key, *there[:2], far)
            gpu.unpack_fields(there[0], constants[1], limit, largest, there[2], far)
        np.testing.assert_array_equal(there[0].get(), words)
        np.testing.assert_array_equal(there[1].get(), sent)
        np.testing.assert_array_equal(there[2].get(), out)
        np.testing.assert_allclose(there_lost.item(), lost, rtol=1e-4)
        finite = np.where(np.abs(array) < 10, array, 0)
        lost = cpu.pack_fields(finite, inverses, steps, limit, largest, key, words, sent, own)
        there_lost = gpu.pack_fields(place.put(finite), *constants, limit, largest, key, *there[:2], far)
        np.testing.assert_allclose(there_lost.item(), lost, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 5])
def test_levels(place, dtype, size, ranks):
    array = np.random.default_rng(size).normal(size=size).astype(dtype)
    if size > 100:
        array[:70] = np.array(BAD * 10).astype(dtype)
    words, levels = np.empty(cpu.words_of(size, ranks), np.uint64), np.zeros(size, np.uint8)
    there, there_levels = place.empty(words.size, np.uint64), place.zeros(size, np.uint8)
    cpu.pack_objections(array, dtype(7.5), 7, ranks, words)
    cpu.settle_levels(words, ranks, 3, levels)
    with place.quiet():
        gpu.pack_objections(place.put(array), dtype(7.5), 7, ranks, there)
        gpu.settle_levels(there, ranks, 3, there_levels)
    np.testing.assert_array_equal(there.get(), words)
    np.testing.assert_array_equal(there_levels.get(), levels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_votes(place, dtype, size, ranks):
    arrays = np.random.default_rng(size).normal(size=(ranks, size)).astype(dtype)
    arrays[:, ::5] = 0
    count = -(-size // 64)
    votes, out, mean = np.zeros((ranks, count), np.uint64), np.empty(count, np.uint64), np.empty(size, dtype)
    for array, own in zip(arrays, votes, strict=True):
        cpu.pack_votes(array, own)
        words = place.empty(count, np.uint64)
        with place.quiet():
            gpu.pack_votes(place.put(array), words)
        np.testing.assert_array_equal(words.get(), own)
    cpu.majority(votes, out)
    cpu.unpack_votes(out, 0.1, mean)
    there, there_mean = place.empty(count, np.uint64), place.empty(size, dtype)
    with place.quiet():
        gpu.majority(place.put(votes.reshape(-1)), there)
        gpu.unpack_votes(there, 0.1, there_mean)
    np.testing.assert_array_equal(there.get(), out)
    np.testing.assert_array_equal(there_mean.get(), mean)
