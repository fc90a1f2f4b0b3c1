import numpy as np
import pytest
from mpicomp.kernels import cpu, gpu


def slowly_added(indices, values, factor, out):
    """Add one element after the other: a product is rounded, and then a sum."""
    total, factor = out.copy(), out.dtype.type(factor)
    for index, value in zip(indices, values, strict=True):
        total[index] += factor * value
    return total


@pytest.mark.parametrize("order", ["ascending", "repeated", "one"])
@pytest.mark.parametrize("factor", [0.25, 1 / 3])
def test_scatter_add_rounds_in_the_order_given(kernels, dtype, order, factor):
    """Ranks add up the mean for themselves: with and without a fused multiply-add it needs the same bits."""
    rng = np.random.default_rng(0)
    size, count = 7000, 3000
    indices = rng.integers(0, size // 10, count)
    if order == "ascending":
        indices = np.sort(rng.choice(size, count, replace=False))
    elif order == "repeated":
        indices = np.sort(indices)
    elif order == "one":
        indices[:] = 5
    indices = indices.astype(np.uint32)
    values, out = rng.normal(size=count).astype(dtype), rng.normal(size=size).astype(dtype)
    expected = slowly_added(indices, values, factor, out)
    assert kernels.scatter_add(indices, values, factor, out)
    np.testing.assert_array_equal(out, expected)


def test_indices_in_any_order_are_the_hosts(place):
    rng = np.random.default_rng(0)
    indices, values = rng.integers(0, 700, 3000).astype(np.uint32), rng.normal(size=3000).astype(np.float32)
    out = rng.normal(size=7000).astype(np.float32)
    expected, there = slowly_added(indices, values, 0.25, out), place.put(out)
    assert not gpu.scatter_add(place.put(indices), place.put(values), 0.25, there).item()
    np.testing.assert_array_equal(there.get(), out)
    assert cpu.scatter_add(indices, values, 0.25, out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("bad", [3, 4, 2**31, 2**32 - 1])
def test_an_index_out_of_range_writes_nothing(kernels, dtype, bad):
    out, received, indices = np.zeros(3, dtype), np.zeros(3, dtype), np.array([0, bad, 1], np.uint32)
    assert not kernels.scatter_add(indices, np.ones(3, dtype), 1.0, out)
    assert not kernels.gather(np.ones(3, dtype), indices, received)
    assert not out.any()
    assert not received.any()


def test_scatter_of_no_elements(kernels, dtype):
    array, indices, values = np.ones(3, dtype), np.empty(0, np.uint32), np.empty(0, dtype)
    assert kernels.scatter_add(indices, values, 1.0, array)
    assert kernels.gather(array, indices, values)
    assert kernels.gather(np.empty(0, dtype), indices, values)
    kernels.clear_at(indices, array)
    assert array.tolist() == [1, 1, 1]


def test_gather_subtract_and_clear(kernels, dtype):
    array = np.random.default_rng(0).normal(size=6000).astype(dtype)
    indices = np.sort(np.random.default_rng(1).choice(6000, 900, replace=False)).astype(np.uint32)
    values, expected = np.empty(900, dtype), array.copy()
    assert kernels.gather(array, indices, values)
    np.testing.assert_array_equal(values, array[indices])
    kernels.subtract_at(indices, values / 2, array)
    expected[indices] -= values / 2
    np.testing.assert_array_equal(array, expected)
    kernels.clear_at(indices, array)
    expected[indices] = 0
    np.testing.assert_array_equal(array, expected)
