"""Buckets of more than 2^31 elements: indices, counts and messages stay right.

Their arrays are folded, see `folded`: all but three windows of each is zero, and takes no memory. The windows are at
the beginning, around element 2^31, and at the end. A test takes half a minute, and less than 1 GB.
"""

import numpy as np
import pytest
from limits.folded import folded
from marks import slow
from worlds import Ranks

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.gpu import Device

NUMEL = 2**31 + 2**18 + 3
WINDOWS = [slice(0, 1 << 17), slice(2**31 - (1 << 16), 2**31 + (1 << 16)), slice(NUMEL - (1 << 17), NUMEL)]
LONG = 1 << 30  # bytes, from which on arrays are folded
FEW = 3e-5  # elements: a few tens of thousands of the 400,000 that are not zero

SELECTIONS = [
    (mpicomp.TopK(ratio=FEW, indices="plain"), "allgather"),
    (mpicomp.TopK(ratio=FEW, indices="elias-fano", wire="fp16"), "allgather"),
    (mpicomp.TopK(ratio=FEW, wire="q4"), "allgather"),
    (mpicomp.TopK(ratio=FEW), "star-topk"),
    (mpicomp.TopK(ratio=FEW), "oktopk"),
    (mpicomp.SIDCo(ratio=FEW), "var-topk"),
    (mpicomp.DGC(ratio=FEW), "allgather"),
    (mpicomp.RedSync(ratio=FEW), "allgather"),
    (mpicomp.GaussianK(ratio=FEW), "allgather"),
    (mpicomp.MSTopK(ratio=FEW), "allgather"),
    (mpicomp.Threshold(limit=2.0), "allgather"),
    (mpicomp.BlockRandomK(ratio=0.0001), "allreduce"),
    (mpicomp.RandomK(ratio=0.001), "allreduce"),
    (mpicomp.LGC(ratio=1e-3, encoder=(2,), decoder=(2,), passes=1, dense_steps=0, training_steps=1), "learned"),
]


@pytest.fixture
def long_arrays(monkeypatch):
    """Have arrays as long as a bucket folded, wherever a reducer makes one."""
    short = Device.empty

    def empty(place, size, dtype):
        if size * np.dtype(dtype).itemsize < LONG:
            return short(place, size, dtype)
        assert NUMEL <= size <= NUMEL + 100, f"an array of {size} elements"
        return folded(size, dtype, [(window.start, window.stop - 1) for window in WINDOWS] + [(NUMEL, size - 1)])

    def zeros(place, size, dtype):
        return empty(place, size, dtype) if size * np.dtype(dtype).itemsize >= LONG else np.zeros(size, dtype)

    monkeypatch.setattr(Device, "empty", empty)
    monkeypatch.setattr(Device, "zeros", zeros)


def gradient_of(rank):
    array, rng = (
        folded(NUMEL, np.float32, [(window.start, window.stop - 1) for window in WINDOWS]),
        np.random.default_rng(rank),
    )
    for window in WINDOWS:
        array[window] = rng.normal(size=window.stop - window.start)
    return array


def held(reducer):
    """Return the residual itself: a copy would not be folded."""
    return reducer.layout._held("residuals")["w"]


def count_nonzero(array):
    """Count what is not zero; folded pages would be counted for each place that they are at."""
    return [np.count_nonzero(array[window]) for window in WINDOWS]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("compressor", "collective"), SELECTIONS, ids=str)
def test_long_arrays_lose_nothing(compressor, collective, long_arrays):
    """An index that is cut, or has a wrong sign, puts a value somewhere else: then the law does not hold there."""
    all_ranks = Ranks(2, compressor, collective, feedback=True, bucket_bytes=1 << 40)
    gradients = [gradient_of(rank) for rank in range(2)]
    before = [0.0 for _ in WINDOWS]
    for _ in range(2):
        means = [item["w"] for item in all_ranks.reduce([{"w": gradient} for gradient in gradients])]
        for place, window in enumerate(WINDOWS):
            put_in = sum(array[window].astype(np.float64) for array in gradients) + before[place]
            before[place] = sum(held(reducer)[window].astype(np.float64) for reducer in all_ranks.reducers)
            delivered = 2 * means[0][window].astype(np.float64)
            scale = max(1.0, np.abs(put_in).max())
            np.testing.assert_allclose(delivered + before[place], put_in, rtol=0, atol=4e-6 * scale)
            assert means[1][window].tobytes() == means[0][window].tobytes()
        found = count_nonzero(means[0])
        if isinstance(compressor, mpicomp.BlockRandomK | mpicomp.LGC):
            continue  # one block that may lie anywhere
        assert all(found), f"nothing was delivered of some window: {found}"
        middle = WINDOWS[1].start + np.flatnonzero(means[0][WINDOWS[1]])
        assert middle[0] < 2**31 <= middle[-1]


@pytest.mark.parametrize("numel", [2**32, slow(2**33)])
def test_array_beyond_32_bits_raises_before_allocation(numel):
    array = np.broadcast_to(np.float32(0), numel)
    reducer = Ranks(1, mpicomp.TopK(ratio=0.01)).reducers[0]
    with pytest.raises(ConfigurationError, match=rf"'w' must have fewer than 2\*\*32 elements, got {numel}; split it"):
        reducer.reduce({"w": array})
