"""How much is copied between device and host, how often the host waits for numbers, and how much is launched."""

import numpy as np
import pytest
from device import fake_cuda
from marks import slow
from worlds import Ranks

import mpicomp
from mpicomp.device.cuda import CudaDevice
from mpicomp.transport.gpu_routes import DeviceBuffer, RouteTable

NUMEL = 40_000
STEPS = 3


@pytest.fixture
def cupy(emulated, monkeypatch):
    return fake_cuda.install(monkeypatch, emulated=True)


def counted(cupy, compressor, collective, size, parameters=1, route="staged", shape=(-1,)):
    """Give, on the average over ranks, a step's bytes up and down, reads, launches, and the message's bytes."""
    ranks = Ranks(size, compressor, collective, feedback=None if compressor.contractive else False)
    random = np.random.default_rng(0)
    driver = cupy.driver
    names = [str(number) for number in range(parameters)]
    given = [{name: cupy.empty(NUMEL // parameters, np.float32).reshape(shape) for name in names} for _ in range(size)]
    for step in range(STEPS):
        for array in (item[name] for item in given for name in names):  # where they were before, as frameworks have it
            array._host[:] = random.laplace(size=array.shape)
        if step == STEPS - 1:  # rooms are made and bounds are known by now
            driver.to_host_bytes = driver.from_host_bytes = 0
            cupy.launches.clear()
            places = [place_of(reducer) for reducer in ranks.reducers]
            for device in places:
                device.routes = RouteTable.always(route)
            before = cupy.reads, sum(device.reads for device in places)
        ranks.reduce(given)
    sent = sum(reducer.last_step.buckets[0].sent_bytes for reducer in ranks.reducers) / size
    reads = cupy.reads - before[0] + sum(device.reads for device in places) - before[1]
    return driver.to_host_bytes / size, driver.from_host_bytes / size, reads / size, len(cupy.launches) / size, sent


def place_of(reducer):
    device = reducer.layout.buckets[0].device
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture
def mpi_reads_the_device(monkeypatch):
    """Let the transport get at memory of the device by the way of MPI, which copies nothing to the host for it."""

    def write(self, part, values):
        self._array._host[part] = np.asarray(values)

    monkeypatch.setattr(DeviceBuffer, "__array__", lambda self, dtype=None, copy=None: self._array._host.copy())
    monkeypatch.setattr(DeviceBuffer, "__setitem__", write)


@pytest.mark.parametrize("size", [slow(2), 3])
@pytest.mark.parametrize("parameters", [1, 5])
def test_topk_by_allgather(size, parameters, cupy):
    up, down, reads, launches, sent = counted(cupy, mpicomp.TopK(ratio=0.01), "allgather", size, parameters)
    assert sent <= up <= sent + 64
    assert down == size * sent
    assert reads <= 1
    assert launches <= 12


@pytest.mark.parametrize("size", [slow(2), 3])
def test_topk_on_the_direct_route(size, cupy, mpi_reads_the_device):
    up, down, reads, _, _ = counted(cupy, mpicomp.TopK(ratio=0.01), "allgather", size, route="direct")
    assert up <= 64 + 24 * size
    assert down == 0
    assert reads <= 1


@pytest.mark.parametrize("size", [slow(2), 3])
def test_dense_is_as_it_was(size, cupy):
    """The gradient and four numbers up, the mean and four down."""
    up, down, reads, launches, _ = counted(cupy, mpicomp.Dense(), "allreduce", size)
    assert 4 * (NUMEL + 4) <= up <= 4 * (NUMEL + 4) + 64
    assert down == 4 * (NUMEL + 4)
    assert reads <= 1
    assert launches <= 6


@pytest.mark.parametrize(
    ("compressor", "most_reads", "most_launches"),
    [
        (mpicomp.QSGD(), 1, 8),
        (mpicomp.OneBit(), 1, 8),
        (mpicomp.SIDCo(ratio=0.01), 2, 24),
        slow(mpicomp.DGC(ratio=0.01), 3, 24),
        (mpicomp.RedSync(ratio=0.01), 3, 24),
        slow(mpicomp.GaussianK(ratio=0.01), 4, 24),
        slow(mpicomp.MSTopK(ratio=0.01), 4, 32),
    ],
    ids=str,
)
def test_messages_by_allgather(compressor, most_reads, most_launches, cupy):
    """Selections by estimated thresholds vary in length, which the host has to know before its message."""
    size = 2
    collective = "packed-allgather" if compressor.message == "packed" else "allgather"
    up, down, reads, launches, sent = counted(cupy, compressor, collective, size)
    assert up <= sent + 128
    assert down <= size * (sent + 64)
    assert reads <= most_reads
    assert launches <= most_launches


def test_factors(cupy):
    """Two rounds, in each of which what travels goes up and down once."""
    up, down, reads, _, sent = counted(cupy, mpicomp.PowerSGD(rank=2), "auto", 2, shape=(200, 200))
    assert sent <= 4 * 2 * (200 + 200) + 256
    assert sent <= up <= sent + 128
    assert sent <= down <= sent + 64
    assert reads <= 4
