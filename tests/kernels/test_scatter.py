import numpy as np
import pytest
from mpicomp.kernels import cpu


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scatter_add_counts_every_occurrence(dtype):
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 50, 200).astype(np.uint32)
    values = rng.normal(size=200).astype(dtype)
    out = rng.normal(size=50).astype(dtype)
    expected = out.astype(np.float64)
    for index, value in zip(indices, values, strict=True):
        expected[index] += 0.25 * float(value)
    assert cpu.scatter_add(indices, values, 0.25, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [3, 4, 2**31, 2**32 - 1])
def test_an_index_out_of_range_writes_nothing(bad):
    memory = np.zeros(10, np.float32)
    out = memory[2:5]
    indices = np.array([0, bad, 1], np.uint32)
    assert not cpu.scatter_add(indices, np.ones(3, np.float32), 1.0, out)
    assert not cpu.gather(out, indices, np.empty(3, np.float32))
    assert not memory.any()


def test_nothing_selected():
    out = np.ones(3, np.float32)
    nothing = np.empty(0, np.uint32)
    assert cpu.scatter_add(nothing, np.empty(0, np.float32), 1.0, out)
    assert cpu.gather(np.empty(0, np.float32), nothing, np.empty(0, np.float32))
    assert out.tolist() == [1, 1, 1]


def test_gather_and_subtract():
    array = np.arange(6, dtype=np.float64)
    indices = np.array([1, 4], np.uint32)
    values = np.empty(2)
    assert cpu.gather(array, indices, values)
    assert values.tolist() == [1, 4]
    cpu.subtract_at(indices, np.array([0.5, 4.0]), array)
    assert array.tolist() == [0, 0.5, 2, 3, 0, 5]


def test_a_product_is_rounded_before_it_is_added():
    """Ranks add up the mean for themselves: with and without a fused multiply-add it has to have the same bits."""
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float64):
        out, values = rng.normal(size=(2, 5000)).astype(dtype)
        indices = rng.permutation(5000).astype(np.uint32)
        expected = out.copy()
        expected[indices] += values * dtype(1 / 3)
        assert cpu.scatter_add(indices, values, 1 / 3, out)
        np.testing.assert_array_equal(out, expected)
