"""The reducer over real MPI: the same numbers as among ranks in one process, and the same errors on all ranks."""

import numpy as np
import pytest
from marks import once
from schemes import OWN
from worlds import Ranks

import mpicomp
from mpicomp.testing import pairs

pytestmark = pytest.mark.mpi


def gradients(rank, step):
    rng = np.random.default_rng((rank, step))
    return {
        "fp32": rng.normal(size=(7, 11)).astype(np.float32),
        "fp64": rng.normal(size=(5, 3)),
        "fp16": rng.normal(size=33).astype(np.float16),
        "one": rng.normal(size=1).astype(np.float32),
        "none": np.empty((0, 3), np.float32),
        "backwards": rng.normal(size=(6, 8)).astype(np.float32)[::-1, ::-3],
        "large": rng.standard_t(3, size=40_000).astype(np.float32),
    }


def gather(comm, array):
    array = np.ascontiguousarray(array)
    everyones = np.empty((comm.size, array.nbytes), np.uint8)
    comm.Allgather(array.reshape(-1).view(np.uint8), everyones)
    return [row.view(array.dtype).reshape(array.shape) for row in everyones]


@pytest.mark.parametrize(("compressor", "collective"), once(pairs(OWN)), ids=str)
@pytest.mark.parametrize("bucket_bytes", [1000, pytest.param(1 << 20, marks=pytest.mark.slow)])
@pytest.mark.quick
def test_steps_over_mpi_keep_the_law_and_the_bits(comm, compressor, collective, bucket_bytes):
    reducer = mpicomp.Reducer(compressor, collective, feedback=True, comm=comm, bucket_bytes=bucket_bytes)
    here = Ranks(comm.size, compressor, collective, feedback=True, bucket_bytes=bucket_bytes)
    kept = None
    for step in range(3):
        everyones = [gradients(rank, step) for rank in range(comm.size)]
        means = reducer.reduce(everyones[comm.rank])
        expected = here.reduce(everyones)[0]
        residuals = {name: gather(comm, reducer.residual(name)) for name in means}
        for name, mean in means.items():
            for other in gather(comm, mean):
                assert other.tobytes() == mean.tobytes()
            tolerance = (
                2**-10 if mean.dtype == np.float16 else 2**-7 if compressor == mpicomp.Dense(wire="bf16") else 2**-10
            )
            exact = isinstance(compressor, mpicomp.TopK) and collective == "allgather"
            np.testing.assert_allclose(mean, expected[name], rtol=0 if exact else tolerance, atol=0 if exact else 1e-2)
            put_in = sum(one[name].astype(np.float64) for one in everyones)
            put_in = put_in + (0 if kept is None else kept[name])
            delivered = comm.size * mean.astype(np.float64)
            left = sum(residual.astype(np.float64) for residual in residuals[name])
            eps = 2**-10 if mean.dtype == np.float16 else 4e-6
            scale = max([1.0, *np.abs(delivered).ravel()])
            np.testing.assert_allclose(delivered + left, put_in, rtol=0, atol=2 * eps * scale, err_msg=name)
        kept = {name: sum(residual.astype(np.float64) for residual in every) for name, every in residuals.items()}
    reducer.close()


def test_allreduce_averages_one_array(comm):
    array = np.arange(12, dtype=np.float32).reshape(3, 4) * (comm.rank + 1)
    mean = mpicomp.allreduce(array, comm=comm)
    factor = sum(range(1, comm.size + 1)) / comm.size
    np.testing.assert_allclose(mean, np.arange(12).reshape(3, 4) * factor, rtol=1e-6)
    top = mpicomp.allreduce(array, compressor=mpicomp.TopK(ratio=0.25), comm=comm)
    np.testing.assert_allclose(top[2], mean[2] * (np.arange(8, 12) > 8), rtol=1e-6)
    np.testing.assert_array_equal(top[:2], 0)
    world = mpicomp.allreduce(array)  # MPI.COMM_WORLD, twice over one duplicate
    np.testing.assert_array_equal(mpicomp.allreduce(array), world)
    np.testing.assert_array_equal(world, mean)


def test_two_reducers_have_separate_messages(comm):
    first = mpicomp.Reducer(mpicomp.TopK(ratio=0.5), comm=comm, policy={"warmup": 0})
    second = mpicomp.Reducer(comm=comm)
    for step in range(3):
        array = np.arange(4, dtype=np.float32) + step
        np.testing.assert_allclose(second.reduce({"w": array})["w"], array)
        first.reduce({"w": array})
    second.close()
    first.reduce({"w": np.ones(4, np.float32)})
    first.close()


def test_seconds_and_bytes_are_recorded(comm):
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=0.01), "allgather", comm=comm)
    for _ in range(2):
        reducer.reduce({"w": np.random.default_rng(0).normal(size=10_000)})
    [bucket] = reducer.last_step.buckets
    # Header, values, and Elias-Fano in words of 64 bits: 6 low bits an index, and 100 + ceil(10,000 / 64) for the rest.
    message = 24 + 100 * 8 + (10 + 5) * 8
    assert bucket.sent_bytes == (message if comm.size > 1 else 0)
    assert bucket.wire_bytes == (comm.size - 1) * message
    assert all(bucket.phases_s[name] > 0 for name in ("compress", "exchange", "decode"))
    assert reducer.last_step.seconds >= sum(bucket.phases_s.values())
    reducer.close()
