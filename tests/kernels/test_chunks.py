import numpy as np
import oracle
import pytest
from device import emulator
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, 1e-40])


def check(kernels, array, chunk, k, rest):
    expected = []
    for start in range(0, array.size, chunk):
        part = array[start : start + chunk]
        expected += [start + index for index in oracle.largest(part, k if part.size == chunk else rest)]
    indices, values = np.full(len(expected), 2**32 - 1, np.uint32), np.full(len(expected), 12345, array.dtype)
    emulator.launches.clear()
    kernels.select_in_chunks(array, chunk, k, rest, indices, values)
    assert len(emulator.launches) == kernels.emulated
    assert indices.tolist() == expected
    np.testing.assert_array_equal(values, array[indices])


@given(data=st.data())
def test_the_largest_of_each_chunk(kernels, dtype, data):
    elements = FEW | st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False)
    array = data.draw(hnp.arrays(dtype, st.integers(1, 70), elements=elements))
    chunk = data.draw(st.integers(1, 80))
    k = data.draw(st.integers(1, chunk))
    check(kernels, array, chunk, k, data.draw(st.integers(1, max(1, array.size % chunk))))


@pytest.mark.parametrize(
    ("size", "chunk"), [(1, 1), (1000, 1000), (4096, 4096), (10_000, 4096), (5001, 64), (5000, 7000)]
)
def test_the_largest_of_chunks_of_large_arrays(kernels, dtype, size, chunk):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[::7] = 0.25  # ties, in the first digit of many thresholds
    for k in {max(1, chunk // 50), min(chunk, size)}:
        check(kernels, array, chunk, k, max(1, size % chunk // 3))
