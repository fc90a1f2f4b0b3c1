"""Means of sparse selections and of sparse rows, against dense arrays."""

import numpy as np
import pytest

from mpicomp.collectives.rows import mean_of_rows
from mpicomp.collectives.scheme import LazyMean
from mpicomp.transport import LocalWorld
from mpicomp.workspace import Workspace


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sparse_mean_overwrites_an_array(dtype):
    rng = np.random.default_rng(0)
    indices = np.sort(rng.choice(1000, 30, replace=False)).astype(np.uint32)
    values = rng.normal(size=indices.size).astype(dtype)
    expected = np.zeros(1000, dtype)
    expected[indices] = values
    mean, workspace = LazyMean.of(1000, indices, values), Workspace()
    for _ in range(2):
        out = np.full(1000, np.nan, dtype)
        mean.write(out)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(mean.in_workspace(workspace), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mean_of_rows_is_that_of_dense_arrays(size, dtype):
    groups = [end.group for end in LocalWorld(size).transports]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        dense, sparse = np.zeros((size, 20, 3)), []
        for whole in dense:
            indices = np.flatnonzero(rng.random(20) < 0.4 * rng.random())
            rows = rng.normal(size=(indices.size, 3)).astype(dtype)
            sparse.append((indices, rows))
            whole[indices] = rows
        exchanges = [mean_of_rows(*rows, group) for rows, group in zip(sparse, groups, strict=True)]
        found = LocalWorld(size).run(exchanges)
        for indices, rows in found:
            assert indices.tolist() == sorted({int(index) for present, _ in sparse for index in present})
            whole = np.zeros((20, 3))
            whole[indices] = rows
            np.testing.assert_allclose(whole, dense.mean(axis=0), rtol=1e-6, atol=1e-7)
            assert rows.dtype == dtype
            assert rows.tobytes() == found[0][1].tobytes()


def test_mean_of_rows_takes_ranks_without_a_gradient():
    world = LocalWorld(3)
    empty, none, rows = np.array([], np.int64), np.empty((0, 2), np.float32), np.ones((1, 2), np.float32)

    def mean(*of_ranks):
        return world.run([mean_of_rows(*ours, end.group) for ours, end in zip(of_ranks, world.transports, strict=True)])

    assert mean(*[(None, none)] * 3) == [None] * 3
    for indices, means in mean((None, none), (np.array([4]), rows), (empty, none)):
        assert indices.tolist() == [4]
        np.testing.assert_allclose(means, [[1 / 3, 1 / 3]])
    assert all(indices.size == 0 for indices, _ in mean(*[(empty, none)] * 3))
