import math

import numpy as np
import pytest
from mpicomp.kernels import cpu

DTYPES = [np.float32, np.float64]
SIZES = [0, 1, 63, 64, 65, 1023, 1024, 1025, 5000]


def laplace(size, dtype, seed=0):
    return np.random.default_rng([size, seed]).laplace(size=size).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 0.7, 3.0, 1e30])
def test_what_exceeds_a_threshold(dtype, size, threshold):
    array = laplace(size, dtype)
    limit = float(dtype(threshold))
    above = [abs(float(value)) - limit for value in array if abs(float(value)) > limit]
    found = cpu.tail(array, threshold)
    precision = 1e-5 if dtype == np.float32 else 1e-12
    assert found.count == len(above)
    assert math.isclose(found.excess, math.fsum(above), rel_tol=precision)
    assert math.isclose(found.squares, math.fsum(over * over for over in above), rel_tol=precision)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_selection_above_a_threshold(dtype, size):
    array = laplace(size, dtype)
    threshold = float(np.abs(array[size // 2])) if size else 1.0  # one element equals it and is not selected
    expected = [place for place in range(size) if abs(array[place]) > threshold]
    indices, values = np.full(size + 3, 999, np.uint32), np.zeros(size + 3, dtype)
    count = cpu.select_above(array, threshold, 11, indices, values, 2)
    assert count == 2 + len(expected)
    assert indices[2:count].tolist() == [11 + place for place in expected]
    np.testing.assert_array_equal(values[2:count], array[expected])
    assert (indices[:2] == 999).all()
    assert (indices[count:] == 999).all()


def test_what_does_not_fit_is_counted_and_not_written():
    array = np.ones(500, np.float32)
    memory, values = np.full(20, 999, np.uint32), np.zeros(20, np.float32)
    assert cpu.select_above(array, 0.5, 0, memory[:10], values[:10], 0) == 500
    assert (memory[10:] == 999).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_above_everything(dtype):
    array = np.array([1.0, np.nan, np.inf, -np.inf, -np.nan], dtype)
    indices, values = np.zeros(5, np.uint32), np.zeros(5, dtype)
    assert cpu.select_above(array, 1e308, 0, indices, values, 0) == (4 if dtype == np.float64 else 2)
    assert cpu.select_above(array, float(np.finfo(dtype).max), 0, indices, values, 0) == 4
    assert cpu.tail(array, 2.0).count == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_among_listed_candidates(dtype):
    array = laplace(3000, dtype)
    index = np.empty(3000, np.uint32)
    bits = np.empty(3000, np.uint32 if dtype == np.float32 else np.uint64)
    out = np.empty_like(array)
    found, _ = cpu.accumulate_candidates(array, None, out, cpu.magnitude_bits(1.0, out.dtype), 0, index, bits, 0)
    for threshold in (1.0, 2.5, 100.0):
        indices, values = np.zeros(found, np.uint32), np.zeros(found, dtype)
        count = cpu.select_listed(index[:found], bits[:found], threshold, out, indices, values)
        expected = np.flatnonzero(np.abs(array) > dtype(threshold))
        assert indices[:count].tolist() == expected.tolist()
        np.testing.assert_array_equal(values[:count], array[expected])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_find_the_same(dtype, threads):
    array = laplace(300_001, dtype)
    for stride in (1, 3):
        expected = cpu.tail(array, 1.3, stride)
        np.testing.assert_allclose(cpu.tail(array, 1.3, stride, threads), expected, rtol=1e-6)


def test_a_sample_takes_every_sth_group():
    array = laplace(50_000, np.float32)
    groups = np.concatenate([array[start : start + 1024] for start in range(0, array.size, 1024 * 7)])
    np.testing.assert_allclose(cpu.tail(array, 1.3, 7), cpu.tail(groups, 1.3), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-20, 1e15, 1e25, 1e37])
def test_every_scale_of_a_float32(scale):
    array = (scale * np.random.default_rng(3).laplace(size=3000)).astype(np.float32)
    limit = float(np.float32(scale))
    above = [abs(float(value)) - limit for value in array if abs(float(value)) > limit]
    found = cpu.tail(array, limit)
    assert found.count == len(above)
    assert math.isclose(found.excess, math.fsum(above), rel_tol=1e-5)
    assert math.isclose(found.squares, math.fsum(over * over for over in above), rel_tol=1e-5)
