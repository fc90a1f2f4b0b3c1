"""One GPU and several: contexts, streams and memory, gradients that move, and what fails on one rank alone."""

import importlib.util
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from device.kinds import TorchMemory
from device.steps_on_a_device import fetched, gradients_of, host, ranks_of, reduced
from mpicomp.kernels.gpu import workspace
from worlds import Ranks

import mpicomp
from mpicomp.errors import MpicompError, OutOfMemoryError
from mpicomp.gpu import cuda
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.thread import ProgressThread

SHAPES = {"first": (30, 20), "second": (9,)}


def test_the_stand_in_has_nothing_that_cupy_lacks(cupy):
    """CuPy can be imported without a GPU: names that a version has dropped, or warns about, are seen."""
    sys.modules.pop("cupy")
    sys.modules.pop("cupyx")
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("no CuPy")
    names = [f"cuda.{name}" for name in vars(cupy.cuda)]
    names += [f"cuda.{part}.{name}" for part in ("runtime", "driver") for name in vars(getattr(cupy.cuda, part))]
    code = f"""import cupy, cupyx, operator
[operator.attrgetter(name)(cupy) for name in {names}]
pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 40, None, 0), 0)
assert cupy.ndarray((10,), "f4", pointer).data.ptr == 4096 and cupyx.empty_pinned"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_thread_takes_no_memory_of_another_gpu(cupy):
    """A thread begins on GPU 0, where a context would take half a gigabyte: CuPy's own `Device` returns there."""
    cupy.driver.use(1)
    cupy.driver.contexts = {1}
    world = LocalWorld(1)
    reducer = mpicomp.Reducer(mpicomp.TopK(ratio=1.0), comm=world.transports[0])
    given = {"w": cupy.asarray(np.arange(20, dtype=np.float32))}
    reducer.reduce(given)
    with ProgressThread(reducer.transport) as thread:
        begun = reducer.stream(thread)
        begun.put("w", given["w"])
        begun.finish(given)
    assert reducer.layout.buckets[0].device.number == 1
    assert cupy.driver.contexts == {1}
    reducer.close()


@pytest.mark.parametrize("moved", [[0, 1], [1]], ids=str)
def test_gradients_that_move_to_another_gpu_take_their_residual_along(moved, cupy):
    there, here = (Ranks(2, mpicomp.TopK(ratio=0.1)) for _ in range(2))
    for step in range(4):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(2)]
        given = []
        for rank in range(2):
            cupy.driver.use(int(step > 1 and rank in moved))
            given.append({name: cupy.asarray(gradient) for name, gradient in gradients[rank].items()})
        np.testing.assert_equal(fetched(there.reduce(given)), fetched(reduced(here, gradients, host)))
        numbers = [reducer.layout.buckets[0].device.number for reducer in there.reducers]
        assert numbers == [int(step > 1 and rank in moved) for rank in range(2)]
    cupy.driver.use(0)


def test_calls_leave_nothing_behind(emulated_cupy):
    """Each call makes a bucket; streams, events, pinned memory and scratch of launches are the GPU's."""
    cupy, counts = emulated_cupy, []
    array = cupy.asarray(np.ones(3000, np.float32))
    for _ in range(6):
        mpicomp.allreduce(array, mpicomp.TopK(ratio=0.1), comm=LocalWorld(1).transports[0])
        device = cuda.cuda_device(0, False)
        pools = sum(map(len, workspace.pools.by_key.values()))
        counts.append((len(cupy.driver.streams), len(device._pinned), pools))
    assert len(set(counts[1:])) == 1


def test_the_first_step_makes_one_set_of_buckets(cupy, torch_memory):
    """Where the length of buckets depends on what the policy measures, too, as in optimizers."""
    ranks, numel = ranks_of(2, mpicomp.TopK(ratio=0.01), "allgather", bucket_bytes=None), 50_000
    reduced(ranks, [{"w": np.ones(numel, np.float32)} for _ in range(2)], cupy.asarray)
    assert torch_memory.peak / (2 * 4 * numel) < 3  # sum and residual, and a selection


def test_memory_that_one_rank_lacks_for_buckets_is_an_error_of_all(cupy, monkeypatch):
    """A rank that alone fails in the middle of the step would end the job."""
    made = []
    zeros = cuda.CudaDevice.zeros

    def full(device, size, dtype):
        made.append(size)
        if len(made) == 3:
            raise MemoryError("GPU 0 is full")
        return zeros(device, size, dtype)

    monkeypatch.setattr(cuda.CudaDevice, "zeros", full)
    ranks = ranks_of(2, mpicomp.TopK(ratio=0.1), bucket_bytes=None)
    with pytest.raises(OutOfMemoryError, match="GPU 0 is full"):
        reduced(ranks, [gradients_of(rank, 0, SHAPES) for rank in range(2)], cupy.asarray)
    reduced(ranks, [gradients_of(rank, 0, SHAPES) for rank in range(2)], cupy.asarray)


def test_an_error_of_cuda_ends_the_job(cupy, monkeypatch):
    """It is one rank's, and others wait: no `except MpicompError` may go on."""
    [reducer] = Ranks(1, mpicomp.TopK(ratio=0.5)).reducers
    given, ended, begun = cupy.asarray(np.ones(50, np.float32)), [], []
    start = reducer.transport.start
    reducer.reduce({"w": given})
    stream = reducer.layout.buckets[0].device.stream
    synchronize = stream.synchronize
    monkeypatch.setattr(reducer.transport, "abort_exchange", ended.append)
    monkeypatch.setattr(reducer.transport, "start", lambda task: (begun.append(task), start(task))[1])

    def fail():  # after the message, for which others wait
        if begun:
            raise RuntimeError("cudaErrorIllegalAddress")
        synchronize()

    monkeypatch.setattr(stream, "synchronize", fail)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress") as raised:
        reducer.reduce({"w": given})
    assert not isinstance(raised.value, MpicompError)
    assert ended


def test_threads_do_not_share_pinned_memory(cupy, monkeypatch):
    """One that reads a record meets the one that exchanges; an event that is waited for lets the other thread run."""
    device, found = cuda.cuda_device(0, False), []
    device.release(device.pinned(100))
    monkeypatch.setattr(cupy.driver, "wait", lambda event: time.sleep(0.05))
    threads = [threading.Thread(target=lambda: found.append(device.pinned(100))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(pinned) for pinned in found}) == 4


# Memory as torch's allocator keeps it.


def test_memory_that_torch_reserves(emulated_cupy, monkeypatch):
    """In gradients, one of which lies there; torch's lengths are as much shorter as buckets are than a large model's.

    Counters that are always as large are 0.1 of it.
    """
    cupy, numel, buckets = emulated_cupy, 40_000, 3
    memory = TorchMemory(shrink=(32 << 20) // (4 * numel))
    made = cuda.cuda_device
    monkeypatch.setattr(cuda, "cuda_device", lambda number, of_torch: made(number, True))
    monkeypatch.setitem(sys.modules, "torch", memory)
    [reducer] = Ranks(1, mpicomp.TopK(ratio=0.01), "allgather", bucket_bytes=4 * numel).reducers
    reducer.layout.holds_gradients = True
    given = {str(place): cupy.asarray(np.ones(numel, np.float32)) for place in range(buckets)}
    for step in range(3):
        for name in given:
            given[name]._host[:] = np.random.default_rng([step, int(name)]).laplace(size=numel)
        reducer.reduce(given)
        given = {name: reducer.layout.gradient(name) for name in given}
    gradients = 4 * numel * buckets
    assert len(reducer.layout.buckets) == buckets
    assert memory.reserved / gradients - 1 <= 1.4
