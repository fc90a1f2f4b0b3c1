"""Sweeps over whole arrays: norms, scaling, momentum, and the share of a rounding error."""

import math

import numpy as np
import pytest
from mpicomp.kernels import cpu

SIZES = [0, 1, 33, 1000, 1025, 4095, 4096, 4097, 30_011]


@pytest.mark.parametrize("shift", [0, 1])
def test_energy_is_the_squared_norm(kernels, dtype, shift):
    kernels.shift = shift
    for size in SIZES:
        array = np.random.default_rng(size).normal(size=size).astype(dtype)
        exact = math.fsum(float(value) ** 2 for value in array)
        assert math.isclose(kernels.energy(array), exact, rel_tol=1e-12 if kernels.on_gpu else 1e-6)


@pytest.mark.parametrize("scalar", [float, np.float64])
@pytest.mark.parametrize("shift", [0, 1])
def test_scale_multiplies_and_finds_finite_elements(kernels, dtype, shift, scalar):
    kernels.shift = shift
    for size in SIZES:
        array = np.random.default_rng(size).normal(size=size).astype(dtype)
        expected = dtype(0.3) * array
        assert kernels.scale(array, scalar(0.3))
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("place", [0, 4097, 4999])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_scale_sees_one_nonfinite_element(kernels, dtype, bad, place):
    array = np.full(5000, np.finfo(dtype).max, dtype)
    assert kernels.scale(array.copy(), 0.5)
    assert not kernels.scale(array.copy(), 2.0)
    array[place] = bad
    assert not kernels.scale(array, 0.5)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_momentum_rounds_every_product(kernels, dtype, nesterov, shift):
    kernels.shift = shift
    factor, decay = dtype(0.3), dtype(0.9)
    for size in SIZES:
        gradient, velocity = np.random.default_rng(size).normal(size=(2, size)).astype(dtype)
        after, out = np.empty(size, dtype), np.empty(size, dtype)
        kernels.momentum(gradient, 0.3, velocity, 0.9, nesterov, after, out)
        now = decay * (velocity + factor * gradient) if nesterov else decay * velocity + factor * gradient
        np.testing.assert_array_equal(after, now)
        np.testing.assert_array_equal(out, now + factor * gradient if nesterov else now)


@pytest.mark.parametrize("shift", [0, 1])
def test_share_rounding_adds_what_was_rounded_off(kernels, dtype, shift):
    kernels.shift = shift
    for size in SIZES:
        exact, rounded, array, sent = np.random.default_rng(size).normal(size=(4, size)).astype(dtype)
        expected = sent - 3 * (exact.astype(np.float64) - rounded)
        before = np.square(array.astype(np.float64) - sent).sum()
        growth = kernels.share_rounding(exact, rounded, 3, array, sent)
        np.testing.assert_allclose(sent, expected, rtol=1e-5, atol=1e-5)
        change = np.square(array.astype(np.float64) - expected).sum() - before
        np.testing.assert_allclose(growth, change, rtol=1e-4, atol=1e-4)


def check_logarithms(kernels, array, stride=1, threads=1):
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
            check_logarithms(kernels, array, stride)


def test_logarithms_of_the_smallest_and_the_largest(kernels, dtype):
    info = np.finfo(dtype)
    check_logarithms(
        kernels, np.array([info.smallest_subnormal, -info.tiny, info.max / 4, 0, -0.0, 1, -info.max / 4], dtype)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logarithms_of_nonfinite_elements(kernels, dtype, bad):
    _, total, logarithm = kernels.logarithms(np.array([1, bad, 2], dtype))
    assert not np.isfinite(total)
    assert not (kernels.on_gpu and np.isfinite(logarithm))


def test_logarithms_of_every_fraction_of_a_float32(kernels):
    check_logarithms(kernels, np.linspace(0.5, 2, 30_001, dtype=np.float32))
    for value in np.linspace(0.5, 2, 97 if kernels.on_gpu else 997, dtype=np.float32):
        _, _, logarithm = kernels.logarithms(np.array([value]))
        assert abs(logarithm - math.log(float(value))) < 2e-6


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("stride", [1, 4])
def test_logarithms_of_several_threads(threads, stride):
    array = np.random.default_rng(2).laplace(size=300_000).astype(np.float32)
    one = cpu.logarithms(array, stride)
    np.testing.assert_allclose(cpu.logarithms(array, stride, threads), one, rtol=1e-6)
