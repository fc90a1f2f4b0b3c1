import numpy as np
import pytest

from mpicomp.collectives.allgather import SparseMean
from mpicomp.workspace import Workspace


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("most", [3, 900])  # few are cleared one by one, many all at once
def test_every_step_starts_from_zero(dtype, most):
    rng = np.random.default_rng(0)
    workspace = Workspace()
    for _ in range(6):
        mean = SparseMean.cleared(workspace, 1000, np.dtype(dtype))
        assert not mean.array.any()
        expected = np.zeros(1000)
        for _ in range(3):
            indices = np.sort(rng.choice(1000, rng.integers(0, most), replace=False)).astype(np.uint32)
            values = rng.normal(size=indices.size).astype(dtype)
            assert mean.add(indices, values, 0.5)
            expected[indices] += 0.5 * values.astype(np.float64)
            indices[:] = 0  # the caller's array is the caller's again
        np.testing.assert_allclose(mean.array, expected, rtol=1e-5, atol=1e-6)


def test_it_is_the_same_array_at_every_step():
    workspace = Workspace()
    first = SparseMean.cleared(workspace, 10, np.dtype(np.float32)).array
    assert SparseMean.cleared(workspace, 10, np.dtype(np.float32)).array is first
    assert SparseMean.cleared(workspace, 11, np.dtype(np.float32)).array.size == 11


def test_an_index_out_of_range_writes_nothing():
    mean = SparseMean.cleared(Workspace(), 10, np.dtype(np.float32))
    assert not mean.add(np.array([1, 10], np.uint32), np.ones(2, np.float32), 1.0)
    assert not mean.array.any()
