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
def test_scale_multiplies_and_returns_the_top(kernels, dtype, shift, scalar):
    kernels.shift = shift
    for size in SIZES:
        array = np.random.default_rng(size).normal(size=size).astype(dtype)
        expected = dtype(0.3) * array
        top = kernels.scale(array, scalar(0.3))
        np.testing.assert_array_equal(array, expected)
        assert top == cpu.magnitude_bits(float(np.abs(expected).max(initial=0)), np.dtype(dtype))
        assert kernels.is_finite(np.uint64(top), np.dtype(dtype))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_scale_sees_one_nonfinite_element(kernels, dtype, bad):
    array = np.ones(5000, dtype)
    array[4097] = bad
    assert not kernels.is_finite(np.uint64(kernels.scale(array, 2.0)), np.dtype(dtype))
    assert kernels.scale(np.ones(2, dtype), np.inf) == cpu.magnitude_bits(np.inf, np.dtype(dtype))


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
