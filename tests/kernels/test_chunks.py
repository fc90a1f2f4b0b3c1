import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from marks import slow
from mpicomp.kernels import cpu

DTYPES = [np.float32, slow(np.float64)]
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, 1e-40])


def select(array, chunk, k, rest):
    """Indices and values, where unwritten ones would show."""
    count = array.size // chunk * k + (rest if array.size % chunk else 0)
    indices, values = np.full(count, 2**32 - 1, np.uint32), np.full(count, 12345, array.dtype)
    cpu.select_in_chunks(array, chunk, k, rest, indices, values)
    return indices, values


def expected(array, chunk, k, rest):
    chosen = []
    for start in range(0, array.size, chunk):
        part = array[start : start + chunk]
        chosen += [start + index for index in oracle.largest(part, k if part.size == chunk else rest)]
    return chosen


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_the_largest_of_each_chunk(dtype, data):
    width = 32 if dtype == np.float32 else 64
    elements = FEW | st.floats(width=width, allow_nan=False)
    array = data.draw(hnp.arrays(dtype, st.integers(1, 70), elements=elements))
    chunk = data.draw(st.integers(1, 80))
    k = data.draw(st.integers(1, chunk))
    rest = data.draw(st.integers(1, max(1, array.size % chunk)))
    indices, values = select(array, chunk, k, rest)
    assert indices.tolist() == expected(array, chunk, k, rest)
    np.testing.assert_array_equal(values, array[indices])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "chunk"), [(4096, 4096), (10_000, 4096), (20_001, 64), (5000, 7000)])
def test_large_arrays(dtype, size, chunk):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[::7] = 0.25  # ties, in the first digit of many thresholds
    k, rest = max(1, chunk // 50), max(1, size % chunk // 3)
    indices, values = select(array, chunk, k, rest)
    assert indices.tolist() == expected(array, chunk, k, rest)
    np.testing.assert_array_equal(values, array[indices])
