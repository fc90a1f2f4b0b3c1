import math

import numpy as np
import pytest
from mpicomp.kernels import cpu

DTYPES = [np.float32, np.float64]


def check(array, stride=1, threads=1):
    """Compare with the logarithm of every element in turn."""
    groups = [array[start : start + 1024] for start in range(0, array.size, 1024 * stride)]
    magnitudes = [abs(float(value)) for value in np.concatenate([array[:0], *groups]) if value != 0]
    nonzero, total, logarithm = cpu.logarithms(array, stride, threads)
    assert nonzero == len(magnitudes)
    assert math.isclose(total, math.fsum(magnitudes), rel_tol=1e-6)
    expected = math.fsum(math.log(value) for value in magnitudes)
    assert math.isclose(logarithm, expected, rel_tol=1e-6, abs_tol=2e-6 * max(1, nonzero))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 63, 1023, 1025, 5000])
def test_logarithms(dtype, size):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[: size // 5] = 0
    check(array)
    check(array, stride=3)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e38])
def test_every_scale_of_a_float32(scale):
    check((scale * np.random.default_rng(1).uniform(0.1, 3, 3000)).astype(np.float32))


def test_every_fraction_of_a_float32():
    check(np.linspace(0.5, 2, 30_001, dtype=np.float32))
    for value in np.linspace(0.5, 2, 997, dtype=np.float32):
        _, _, logarithm = cpu.logarithms(np.array([value]))
        assert abs(logarithm - math.log(float(value))) < 2e-6


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("stride", [1, 4])
def test_threads_find_the_same(threads, stride):
    check(np.random.default_rng(2).laplace(size=1_000_000).astype(np.float32), stride, threads)
