import itertools
import math

import numpy as np
import pytest
from device.kinds import word_of
from mpicomp.kernels import cpu, gpu

# Edges of the host's vectors and blocks, and of a GPU's warps and tiles.
SIZES = [0, 1, 15, 16, 17, 33, 1000, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 30_011]
BAD = [np.nan, -np.nan, np.inf, -np.inf]


def pair(size, dtype):
    gradient, residual = np.random.default_rng(size).normal(size=(2, size)).astype(dtype)
    gradient[::7] = residual[::7] = 0
    return gradient, residual


def check(kernels, moments, array):
    magnitudes = [abs(float(value)) for value in kernels.seen(array)]
    precision = 1e-6 if array.dtype == np.float32 and not kernels.on_gpu else 1e-12
    assert moments.nonzero == sum(value != 0 for value in magnitudes)
    assert moments.finite
    assert math.isclose(moments.total, math.fsum(magnitudes), rel_tol=precision)
    assert math.isclose(moments.energy, math.fsum(value * value for value in magnitudes), rel_tol=precision)


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_accumulate_adds_multiplies_and_sums_moments(kernels, dtype, shift, factor):
    kernels.shift = shift
    for size, scale in itertools.product(SIZES, (1.0, 1e-30, 1e17)):
        gradient, residual = (dtype(scale) * array for array in pair(size, dtype))
        for memory, added in ((residual, gradient + residual), (None, gradient)):
            out = np.full(size, np.nan, dtype)
            moments = kernels.accumulate(gradient, memory, out, 1, factor)
            np.testing.assert_array_equal(out, dtype(factor) * added)
            check(kernels, moments, added)


def test_moments_of_scales_mixed_within_a_block(kernels, dtype):
    rng = np.random.default_rng(3)
    least, most = (-44, 37) if dtype == np.float32 else (-300, 150)
    array = (rng.normal(size=4000) * 10.0 ** rng.integers(least, most, 4000)).astype(dtype)
    check(kernels, kernels.accumulate(array, None, np.empty_like(array)), array)


def test_moments_whose_squares_overflow_are_finite(kernels):
    array = np.array([1e300, -1e300])
    moments = kernels.accumulate(array, None, np.empty_like(array))
    assert moments.finite
    assert moments.energy == np.inf


@pytest.mark.parametrize("bad", BAD)
def test_accumulate_sees_one_nonfinite_element(kernels, dtype, bad):
    for position in (0, 1030, 4097, 4999):
        gradient = np.ones(5000, dtype)
        gradient[position] = bad
        assert not kernels.accumulate(gradient, np.zeros(5000, dtype), np.empty(5000, dtype)).finite
        assert not kernels.accumulate(gradient, None, np.empty(5000, dtype)).finite


def test_accumulate_sees_a_sum_that_overflows(kernels):
    big = np.full(3, 3e38, np.float32)
    assert not kernels.accumulate(big, big, np.empty(3, np.float32)).finite


def test_accumulate_in_place(kernels, dtype):
    array = np.arange(5000, dtype=dtype)
    kernels.accumulate(array, None, array)
    np.testing.assert_array_equal(array, np.arange(5000))
    kernels.accumulate(np.ones(5000, dtype), array, array)
    np.testing.assert_array_equal(array, np.arange(1, 5001))


def test_moments_add_up_on_a_device(place):
    good, bad = (place.put(np.array(array, np.float32)) for array in ([1, -2, 0], [np.nan, 1, 3]))
    with place.quiet():
        first, second = (gpu.accumulate(array, None, place.empty(3, np.float32)) for array in (good, bad))
        twice, spoiled = first + first, first + second
    assert tuple(number.item() for number in twice) == tuple(cpu.Moments(4, 6.0, 10.0, True))
    assert not spoiled.finite.item()


@pytest.mark.parametrize("scalar", [int, np.uint64])
def test_candidates_are_all_that_reach_the_bound(kernels, dtype, scalar):
    bound = scalar(cpu.magnitude_bits(1.5, np.dtype(dtype)))
    start = 2 if scalar is int else np.int64(2)
    for size in SIZES:
        gradient, residual = pair(size, dtype)
        out, index, bits = np.empty(size, dtype), np.empty(size + 2, np.uint32), np.empty(size + 2, word_of(dtype))
        found, moments = kernels.accumulate_candidates(gradient, residual, out, bound, 7, index, bits, start)
        expected = np.flatnonzero(np.abs(gradient + residual) >= 1.5)
        assert found == 2 + expected.size
        np.testing.assert_array_equal(index[2:found], expected + 7)
        np.testing.assert_array_equal(bits[2:found].view(dtype), np.abs(out[expected]))
        check(kernels, moments, out)


@pytest.mark.parametrize("bound", [0, 1])
def test_candidates_without_room_are_counted_only(kernels, dtype, bound):
    array = np.random.default_rng(0).normal(size=5000).astype(dtype)
    index, bits = np.full(700, 999, np.uint32), np.zeros(700, word_of(dtype))
    found, _ = kernels.accumulate_candidates(array, None, array.copy(), bound, 0, index, bits, 5)
    assert found == 5005
    np.testing.assert_array_equal(index[5:], np.arange(695))
    np.testing.assert_array_equal(bits[5:].view(dtype), np.abs(array[:695]))
    assert (index[:5] == 999).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_candidates_of_several_threads_are_the_same(dtype, threads):
    size = 400_001
    gradient, residual = np.random.default_rng(7).laplace(size=(2, size)).astype(dtype)
    bound = cpu.magnitude_bits(4.0, np.dtype(dtype))

    def sweep(threads, room):
        out, index, bits = np.empty(size, dtype), np.full(room, 7, np.uint32), np.full(room, 7, word_of(dtype))
        count, moments = cpu.accumulate_candidates(gradient, residual, out, bound, 5, index, bits, 3, threads)
        return out, index, bits, count, moments

    out, index, bits, count, moments = sweep(1, size)
    other = sweep(threads, size)
    np.testing.assert_array_equal(other[0], out)
    assert other[3] == count
    np.testing.assert_array_equal(other[1][:count], index[:count])
    np.testing.assert_array_equal(other[2][:count], bits[:count])
    np.testing.assert_allclose(other[4], moments, rtol=1e-6)
    np.testing.assert_allclose(cpu.accumulate(gradient, residual, out, threads), moments, rtol=1e-6)
    # Without room for all of them the count exceeds the room, whatever their distribution over threads.
    assert sweep(threads, count - 1)[3] > count - 1


def test_candidates_beyond_the_room_of_a_thread():
    gradient = np.zeros(1 << 18, np.float32)
    gradient[:100] = 1  # all of them in the first thread's part, with half of the room
    index, bits = np.empty(120, np.uint32), np.empty(120, np.uint32)
    one = cpu.magnitude_bits(1, gradient.dtype)
    count, _ = cpu.accumulate_candidates(gradient, None, gradient.copy(), one, 0, index, bits, 0, threads=2)
    assert count > 120
