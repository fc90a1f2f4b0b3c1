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
    energy, top = cpu.accumulate(gradient, residual if with_residual else None, out)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(energy, sum(float(value) ** 2 for value in expected), rtol=1e-12)
    assert cpu.is_finite(top, out.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1030, 4999])
def test_one_bad_element_is_seen(dtype, bad, place):
    gradient = np.ones(5000, dtype)
    gradient[place] = bad
    _, top = cpu.accumulate(gradient, np.zeros(5000, dtype), np.empty(5000, dtype))
    assert not cpu.is_finite(top, np.dtype(dtype))
    word = np.uint32 if dtype == np.float32 else np.uint64
    _, _, top = cpu.accumulate_candidates(
        gradient, None, np.empty(5000, dtype), 1, 0, np.empty(0, np.uint32), np.empty(0, word), 0
    )
    assert not cpu.is_finite(top, np.dtype(dtype))


def test_the_sum_may_overflow_and_is_seen():
    big = np.full(3, 3e38, np.float32)
    _, top = cpu.accumulate(big, big, np.empty(3, np.float32))
    assert not cpu.is_finite(top, big.dtype)


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
    found, energy, _ = cpu.accumulate_candidates(gradient, residual, out, bound, 7, index, bits, 2)
    expected = [place for place in range(size) if abs(gradient[place] + residual[place]) >= 1.5]
    assert found == 2 + len(expected)
    np.testing.assert_array_equal(index[2:found], np.array(expected, int) + 7)
    np.testing.assert_array_equal(bits[2:found].view(dtype), np.abs(out[expected]))
    np.testing.assert_allclose(energy, np.sum(np.square(out, dtype=np.float64)))


def test_candidates_that_do_not_fit_are_counted_and_not_written():
    gradient = np.ones(100, np.float32)
    index, bits = np.full(20, 999, np.uint32), np.zeros(20, np.uint32)
    found, _, _ = cpu.accumulate_candidates(gradient, None, gradient.copy(), 1, 0, index[:10], bits[:10], 0)
    assert found == 100
    assert (index[10:] == 999).all()
