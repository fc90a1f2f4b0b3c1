import math

import numpy as np
import pytest
from mpicomp.kernels import cpu

DTYPES = [np.float32, np.float64]
SIZES = [0, 1, 15, 16, 17, 1023, 1024, 1025, 5000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_residual", [True, False])
def test_sum_energy_and_finiteness(dtype, size, with_residual):
    rng = np.random.default_rng(size)
    gradient, residual = rng.normal(size=(2, size)).astype(dtype)
    expected = gradient + residual if with_residual else gradient
    out = np.empty(size, dtype)
    moments = cpu.accumulate(gradient, residual if with_residual else None, out)
    np.testing.assert_array_equal(out, expected)
    check(moments, expected)


def check(moments, array):
    """Compare with sums in float64, element by element."""
    precision = 1e-6 if array.dtype == np.float32 else 1e-12
    magnitudes = [abs(float(value)) for value in array]
    assert moments.nonzero == sum(value != 0 for value in magnitudes)
    assert moments.finite
    assert math.isclose(moments.total, math.fsum(magnitudes), rel_tol=precision)
    assert math.isclose(moments.energy, math.fsum(value * value for value in magnitudes), rel_tol=precision)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e18, 1e37])
def test_moments_at_every_scale(dtype, scale):
    rng = np.random.default_rng(2)
    array = (scale * rng.laplace(size=3000)).astype(dtype)
    array[rng.random(3000) < 0.2] = 0
    array[:3] = (0.0, -0.0, scale)
    check(cpu.accumulate(array, None, np.empty_like(array)), array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_mixed_within_a_block(dtype):
    rng = np.random.default_rng(3)
    least, most = (-44, 37) if dtype == np.float32 else (-300, 150)
    array = (rng.normal(size=4000) * 10.0 ** rng.integers(least, most, 4000)).astype(dtype)
    check(cpu.accumulate(array, None, np.empty_like(array)), array)


def test_squares_of_finite_numbers_may_overflow():
    array = np.array([1e300, -1e300])
    moments = cpu.accumulate(array, None, np.empty_like(array))
    assert moments.finite
    assert moments.energy == np.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1030, 4999])
def test_one_bad_element_is_seen(dtype, bad, place):
    gradient = np.ones(5000, dtype)
    gradient[place] = bad
    assert not cpu.accumulate(gradient, np.zeros(5000, dtype), np.empty(5000, dtype)).finite
    word = np.uint32 if dtype == np.float32 else np.uint64
    _, moments = cpu.accumulate_candidates(
        gradient, None, np.empty(5000, dtype), 1, 0, np.empty(0, np.uint32), np.empty(0, word), 0
    )
    assert not moments.finite


def test_the_sum_may_overflow_and_is_seen():
    big = np.full(3, 3e38, np.float32)
    assert not cpu.accumulate(big, big, np.empty(3, np.float32)).finite


def test_in_place():
    array = np.arange(100, dtype=np.float32)
    cpu.accumulate(array, np.ones(100, np.float32), array)
    np.testing.assert_array_equal(array, np.arange(1, 101))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_candidates_are_all_that_reach_the_bound(dtype, size):
    rng = np.random.default_rng(size)
    gradient, residual = rng.normal(size=(2, size)).astype(dtype)
    out = np.empty(size, dtype)
    index = np.empty(size + 2, np.uint32)
    bits = np.empty(size + 2, np.uint32 if dtype == np.float32 else np.uint64)
    bound = cpu.magnitude_bits(1.5, out.dtype)
    found, moments = cpu.accumulate_candidates(gradient, residual, out, bound, 7, index, bits, 2)
    expected = [place for place in range(size) if abs(gradient[place] + residual[place]) >= 1.5]
    assert found == 2 + len(expected)
    np.testing.assert_array_equal(index[2:found], np.array(expected, int) + 7)
    np.testing.assert_array_equal(bits[2:found].view(dtype), np.abs(out[expected]))
    check(moments, out)


def test_candidates_that_do_not_fit_are_counted_and_not_written():
    gradient = np.ones(100, np.float32)
    index, bits = np.full(20, 999, np.uint32), np.zeros(20, np.uint32)
    found, _ = cpu.accumulate_candidates(gradient, None, gradient.copy(), 1, 0, index[:10], bits[:10], 0)
    assert found == 100
    assert (index[10:] == 999).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_find_the_same(dtype, threads):
    size = 400_001
    rng = np.random.default_rng(7)
    gradient, residual = rng.laplace(size=(2, size)).astype(dtype)
    word = np.uint32 if dtype == np.float32 else np.uint64

    def sweep(threads, room):
        out, index, bits = np.empty(size, dtype), np.full(room, 7, np.uint32), np.full(room, 7, word)
        bound = cpu.magnitude_bits(4.0, out.dtype)
        count, moments = cpu.accumulate_candidates(gradient, residual, out, bound, 5, index, bits, 3, threads)
        return out, index, bits, count, moments

    out, index, bits, count, moments = sweep(1, size)
    also = sweep(threads, size)
    np.testing.assert_array_equal(also[0], out)
    assert also[3] == count
    np.testing.assert_array_equal(also[1][:count], index[:count])
    np.testing.assert_array_equal(also[2][:count], bits[:count])
    np.testing.assert_allclose(also[4], moments, rtol=1e-6)
    np.testing.assert_allclose(cpu.accumulate(gradient, residual, out, threads), moments, rtol=1e-6)
    # Without room for all of them a count beyond the room says so, however they are spread over threads.
    assert sweep(threads, count - 1)[3] > count - 1


def test_a_part_that_has_no_room_for_its_own_candidates():
    gradient = np.zeros(1 << 18, np.float32)
    gradient[:100] = 1  # all of them in the first thread's part, with half of the room
    index, bits = np.empty(120, np.uint32), np.empty(120, np.uint32)
    one = cpu.magnitude_bits(1, gradient.dtype)
    count, _ = cpu.accumulate_candidates(gradient, None, gradient.copy(), one, 0, index, bits, 0, threads=2)
    assert count > 120
