"""The mean of sparse rows, against dense arrays."""

import numpy as np
import pytest

from mpicomp.collectives.selection import mean_of_rows
from mpicomp.transport import LocalWorld


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_is_the_mean_of_dense_arrays(size, seed, dtype):
    random = np.random.default_rng(seed)
    own, dense = [], []
    for _ in range(size):
        count = int(random.integers(0, 9))
        indices = np.sort(random.choice(20, count, replace=False)).astype(np.int64)
        rows = random.normal(size=(count, 3)).astype(dtype)
        own.append((indices, rows))
        whole = np.zeros((20, 3))
        whole[indices] = rows
        dense.append(whole)
    world = LocalWorld(size)
    groups = [end.group for end in world.transports]
    found = world.run([mean_of_rows(*each, group) for each, group in zip(own, groups, strict=True)])
    for which, rows in found:
        assert which.tolist() == sorted({int(index) for indices, _ in own for index in indices})
        whole = np.zeros((20, 3))
        whole[which] = rows
        np.testing.assert_allclose(whole, np.mean(dense, axis=0), rtol=1e-6, atol=1e-7)
        assert rows.dtype == dtype
        assert rows.tobytes() == found[0][1].tobytes()


def test_ranks_without_a_gradient():
    world = LocalWorld(3)
    none, rows = np.empty((0, 2), np.float32), np.ones((1, 2), np.float32)
    groups = [end.group for end in world.transports]
    assert world.run([mean_of_rows(None, none, group) for group in groups]) == [None] * 3
    own = [(None, none), (np.array([4]), rows), (np.array([], np.int64), none)]
    for which, mean in world.run([mean_of_rows(*each, group) for each, group in zip(own, groups, strict=True)]):
        assert which.tolist() == [4]
        np.testing.assert_allclose(mean, [[1 / 3, 1 / 3]])
    empty = [(np.array([], np.int64), none)] * 3
    for which, _ in world.run([mean_of_rows(*each, group) for each, group in zip(empty, groups, strict=True)]):
        assert which.size == 0
