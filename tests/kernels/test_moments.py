import math

import numpy as np
import pytest
from mpicomp.kernels import cpu


def check(kernels, array, stride=1, threads=1):
    """Compare with the logarithm of every element in turn."""
    sample = kernels.seen(array[np.arange(array.size) // 1024 % stride == 0])
    magnitudes = [abs(float(value)) for value in sample if value != 0]
    nonzero, total, logarithm = kernels.logarithms(array, stride, threads)
    precision = 1e-12 if kernels.on_gpu else 1e-6
    assert nonzero == len(magnitudes)
    assert math.isclose(total, math.fsum(magnitudes), rel_tol=precision)
    expected = math.fsum(math.log(value) for value in magnitudes)
    assert math.isclose(logarithm, expected, rel_tol=precision, abs_tol=2 * precision * max(1, nonzero))


@pytest.mark.parametrize("shift", [0, 1])
def test_logarithms_of_any_size(kernels, dtype, shift):
    kernels.shift = shift
    for size in (0, 1, 63, 1023, 1024, 1025, 5000, 30_011):
        array = np.random.default_rng(size).laplace(size=size).astype(dtype)
        array[: size // 5] = 0
        for stride in (1, 3):
            check(kernels, array, stride)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e38])
def test_logarithms_at_every_scale_of_a_float32(kernels, scale):
    check(kernels, (scale * np.random.default_rng(1).uniform(0.1, 3, 3000)).astype(np.float32))


def test_logarithms_of_the_smallest_and_the_largest(kernels, dtype):
    info = np.finfo(dtype)
    check(kernels, np.array([info.smallest_subnormal, -info.tiny, info.max / 4, 0, -0.0, 1, -info.max / 4], dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logarithms_of_nonfinite_elements(kernels, dtype, bad):
    _, total, logarithm = kernels.logarithms(np.array([1, bad, 2], dtype))
    assert not np.isfinite(total)
    assert not (kernels.on_gpu and np.isfinite(logarithm))


def test_logarithms_of_every_fraction_of_a_float32(kernels):
    check(kernels, np.linspace(0.5, 2, 30_001, dtype=np.float32))
    for value in np.linspace(0.5, 2, 97 if kernels.on_gpu else 997, dtype=np.float32):
        _, _, logarithm = kernels.logarithms(np.array([value]))
        assert abs(logarithm - math.log(float(value))) < 2e-6


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("stride", [1, 4])
def test_logarithms_of_several_threads(threads, stride):
    array = np.random.default_rng(2).laplace(size=300_000).astype(np.float32)
    one = cpu.logarithms(array, stride)
    np.testing.assert_allclose(cpu.logarithms(array, stride, threads), one, rtol=1e-6)
