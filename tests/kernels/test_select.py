import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu.bits import magnitude_of

DTYPES = [np.float32, np.float64]


def floats(dtype):
    width = 32 if dtype == np.float32 else 64
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("inf"), -float("inf"), float("nan"), 1e-40])
    return few | st.floats(width=width, allow_nan=False)  # NaNs of other bits than the listed one order by their bits


@st.composite
def arrays_and_k(draw, dtype):
    array = draw(hnp.arrays(dtype, st.integers(1, 70), elements=floats(dtype)))
    return array, draw(st.integers(1, array.size))


def select(array, k):
    indices, values = np.full(k, 2**32 - 1, np.uint32), np.empty(k, array.dtype)
    cpu.select_largest(array, cpu.kth_magnitude(array, k), indices, values)
    return indices, values


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_the_k_largest_by_radix(dtype, data):
    array, k = data.draw(arrays_and_k(dtype))
    indices, values = select(array, k)
    assert indices.tolist() == oracle.largest(array, k)
    np.testing.assert_array_equal(values, array[indices])


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_the_k_largest_from_candidates(dtype, data):
    array, k = data.draw(arrays_and_k(dtype))
    bound = cpu.kth_magnitude(array, data.draw(st.integers(k, array.size)))
    out = np.empty_like(array)
    index = np.empty(array.size, np.uint32)
    bits = np.empty(array.size, np.uint32 if dtype == np.float32 else np.uint64)
    found, _ = cpu.accumulate_candidates(array, None, out, bound, 0, index, bits, 0)
    assert found >= k
    indices, values = np.empty(k, np.uint32), np.empty(k, dtype)
    smallest = cpu.select_candidates(index[:found], bits[:found], bits[:found].copy(), out, indices, values)
    assert indices.tolist() == oracle.largest(array, k)
    np.testing.assert_array_equal(values, array[indices])
    assert smallest == cpu.kth_magnitude(array, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2047, 2048, 100_003, 600_001])
def test_large_arrays(dtype, size):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    for k in (1, size // 100, size):
        indices, _ = select(array, k)
        order = np.argsort(-np.abs(array), kind="stable")[:k]
        np.testing.assert_array_equal(indices, np.sort(order))


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitudes_and_bits_are_one(dtype):
    for value in (0.0, 1e-40, 0.3, 1.0, 3e38, np.inf):
        value = float(dtype(value))
        assert magnitude_of(cpu.magnitude_bits(value, np.dtype(dtype)), np.dtype(dtype)) == value
