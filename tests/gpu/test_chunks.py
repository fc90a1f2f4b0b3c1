"""Selection in chunks gives the bits of `mpicomp.kernels.cpu`: in an emulation on the host, and on a GPU."""

import numpy as np
import pytest
from gpu import standin
from gpu.alike import assert_alike, with_specials
from marks import slow
from mpicomp.kernels import cpu, gpu


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize(("size", "chunk", "k"), [(1, 1, 1), (300, 64, 5), (1000, 1000, 1000), (3000, 700, 20)])
@pytest.mark.parametrize("ties", [False, True])
def test_select_in_chunks(place, dtype, size, chunk, k, ties):
    array = np.random.default_rng(size).standard_normal(size).astype(dtype)
    if ties:
        array = np.round(array)
    array = with_specials(array)
    rest = max(1, size % chunk // 3)
    count = size // chunk * k + (rest if size % chunk else 0)
    indices, values = np.empty(count, np.uint32), np.empty(count, dtype)
    cpu.select_in_chunks(array, chunk, k, rest, indices, values)
    there_indices, there_values = place.empty(count, np.uint32), place.empty(count, dtype)
    standin.launches.clear()
    with place.quiet():
        gpu.select_in_chunks(place.put(array), chunk, k, rest, there_indices, there_values)
    if place.emulated:
        assert len(standin.launches) == 1
    np.testing.assert_array_equal(there_indices.get(), indices)
    assert_alike(there_values, values)
