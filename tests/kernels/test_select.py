import numpy as np
import oracle
import pytest
from device.kinds import largest, magnitude_words, word_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mpicomp.kernels import cpu

# NaNs of other bits than the listed one order by their bits.
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, 1e-40])


@st.composite
def arrays_and_k(draw, dtype):
    elements = FEW | st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False)
    array = draw(hnp.arrays(dtype, st.integers(1, 70), elements=elements))
    return array, draw(st.integers(1, array.size))


def select(kernels, array, k):
    indices, values = np.full(k, 2**32 - 1, np.uint32), np.empty(k, array.dtype)
    threshold = kernels.kth_magnitude(array, k)
    kernels.select_largest(array, threshold, indices, values)
    return indices, values, threshold


@given(data=st.data())
def test_the_k_largest_by_radix(kernels, dtype, data):
    array, k = data.draw(arrays_and_k(dtype))
    indices, values, _ = select(kernels, array, k)
    assert indices.tolist() == oracle.largest(array, k)
    np.testing.assert_array_equal(values, array[indices])


@given(data=st.data())
def test_the_k_largest_from_candidates(kernels, dtype, data):
    array, k = data.draw(arrays_and_k(dtype))
    bound = cpu.kth_magnitude(array, data.draw(st.integers(k, array.size)))
    words = np.abs(array).view(word_of(dtype))
    index = np.flatnonzero(words >= bound).astype(np.uint32)
    indices, values = np.empty(k, np.uint32), np.empty(k, dtype)
    smallest = kernels.select_candidates(index, words[index], words[index], array, indices, values)
    assert indices.tolist() == oracle.largest(array, k)
    np.testing.assert_array_equal(values, array[indices])
    assert smallest == np.sort(words)[array.size - k]


@pytest.mark.parametrize("kind", ["spread", "tied", "special"])
def test_the_k_largest_of_large_arrays(kernels, dtype, kind):
    for size in (33, 2047, 2048, 4097, 30_011, *((100_003, 600_001) if not kernels.on_gpu else ())):
        rng = np.random.default_rng(size)
        array = rng.laplace(size=size).astype(dtype)
        if kind == "tied":
            array = np.round(array)
        elif kind == "special":
            array[::3] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-42, 3e38], array[::3].size)
        for k in {1, max(1, size // 100), size}:
            indices, values, threshold = select(kernels, array, k)
            np.testing.assert_array_equal(indices, largest(array, k))
            np.testing.assert_array_equal(values.view(word_of(dtype)), array[indices].view(word_of(dtype)))
            assert threshold == magnitude_words(array)[indices].min()


@pytest.mark.parametrize("scalar", [float, np.float64])
def test_magnitudes_and_bits_are_one(kernels, dtype, scalar):
    kind = np.dtype(dtype)
    for value in (0.0, 1e-40, 0.3, 1.0, 3e38, np.inf):
        seen = kernels.seen(kind.type(value)) if scalar is not float else kind.type(value)
        bits = kernels.magnitude_bits(scalar(value), kind)
        assert bits == int(seen.view(word_of(dtype)))
        assert kernels.magnitude_of(np.uint64(bits) if scalar is not float else bits, kind) == float(seen)
