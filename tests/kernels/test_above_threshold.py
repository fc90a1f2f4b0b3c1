import math

import numpy as np
import pytest
from device.kinds import word_of
from mpicomp.kernels import cpu

SIZES = [0, 1, 33, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 30_011]


def laplace(size, dtype, threshold=None):
    """Numbers with zeros and, where a threshold is given, elements equal to it, which are not above it."""
    array = np.random.default_rng([size, 0]).laplace(size=size).astype(dtype)
    array[::11] = 0
    if threshold is not None:
        array[1::11] = dtype(threshold)
    return array


def check(kernels, found, array, threshold):
    limit = float(array.dtype.type(threshold))
    above = [abs(float(value)) - limit for value in kernels.seen(array) if abs(float(value)) > limit]
    precision = 1e-5 if array.dtype == np.float32 and not kernels.on_gpu else 1e-12
    assert found.count == len(above)
    assert math.isclose(found.excess, math.fsum(above), rel_tol=precision)
    assert math.isclose(found.squares, math.fsum(over * over for over in above), rel_tol=precision)


@pytest.mark.parametrize(
    ("threshold", "scalar"), [(0.0, float), (0.7, np.float64), (3.0, float), (3.0, np.float64), (1e30, np.float64)]
)
def test_tail_and_selection_above_a_threshold(kernels, dtype, threshold, scalar):
    for size in SIZES:
        array = laplace(size, dtype, threshold)
        check(kernels, kernels.tail_statistics(array, scalar(threshold)), array, threshold)
        expected = np.flatnonzero(np.abs(array) > dtype(threshold))
        for room in (size + 3, size // 2 + 3):  # what has no room is counted
            indices, values = np.full(room, 999, np.uint32), np.zeros(room, dtype)
            start = 3 if scalar is float else np.int64(3)
            count = kernels.select_above(array, scalar(threshold), 11, indices, values, start)
            assert count == 3 + expected.size
            if count <= room:
                np.testing.assert_array_equal(indices[3:count], 11 + expected)
                np.testing.assert_array_equal(values[3:count], array[expected])
                assert (indices[:3] == 999).all()
                assert (indices[count:] == 999).all()


def test_nonfinite_elements_are_above_every_threshold(kernels, dtype):
    array = np.array([1.0, np.nan, np.inf, -np.inf, -np.nan], dtype)
    indices, values = np.zeros(5, np.uint32), np.zeros(5, dtype)
    for threshold, above in ((1e308, 4 if dtype == np.float64 else 2), (float(np.finfo(dtype).max), 4)):
        assert kernels.select_above(array, threshold, 0, indices, values, 0) == above
    assert kernels.tail_statistics(array, 2.0).count == 4


def test_selection_among_listed_candidates(kernels, dtype):
    for size in (1, 33, 3000, 30_011):
        array = laplace(size, dtype)
        index = np.flatnonzero(np.abs(array) >= 1).astype(np.uint32)
        bits = np.abs(array[index]).view(word_of(dtype))
        for threshold in (1.0, 2.5, 100.0):
            indices, values = np.zeros(index.size, np.uint32), np.zeros(index.size, dtype)
            count = kernels.select_listed(index, bits, threshold, array, indices, values)
            expected = np.flatnonzero(np.abs(array) > dtype(threshold))
            assert indices[:count].tolist() == expected.tolist()
            np.testing.assert_array_equal(values[:count], array[expected])


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("stride", [2, 3, 7])
def test_tail_of_a_sample_takes_every_sth_group(kernels, dtype, shift, stride):
    kernels.shift = shift
    for size in (0, 1, 1023, 1024, 1025, 30_011):
        array = laplace(size, dtype)
        check(kernels, kernels.tail_statistics(array, 1.3, stride), array[np.arange(size) // 1024 % stride == 0], 1.3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [2, 3])
def test_tail_of_several_threads_is_the_same(dtype, threads):
    array = laplace(300_001, dtype)
    for stride in (1, 3):
        expected = cpu.tail_statistics(array, 1.3, stride)
        np.testing.assert_allclose(cpu.tail_statistics(array, 1.3, stride, threads), expected, rtol=1e-6)
