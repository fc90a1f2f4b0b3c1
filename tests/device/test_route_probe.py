"""The choice of a route: measured where every rank's MPI takes device memory, the same on all ranks."""

import numpy as np
import pytest
from device import fake_cuda
from worlds import Ranks

import mpicomp
from mpicomp.transport.gpu_routes import RouteTable

NUMEL = 3000


@pytest.fixture
def cupy(monkeypatch):
    return fake_cuda.install(monkeypatch)


def run(cupy, compressor, size, on_device, takes):
    ranks = Ranks(size, compressor)
    for transport, take in zip(ranks.world.transports, takes, strict=True):
        transport.takes_device_memory = take
    values = [np.random.default_rng(rank).laplace(size=NUMEL).astype(np.float32) for rank in range(size)]
    given = [{"w": cupy.asarray(value) if there else value} for value, there in zip(values, on_device, strict=True)]
    means = [item["w"] for item in ranks.reduce(given)]
    hosts = [mean.get() if isinstance(mean, fake_cuda.ndarray) else mean.copy() for mean in means]
    [expected] = {item["w"].tobytes() for item in Ranks(size, compressor).reduce([{"w": value} for value in values])}
    assert {host.tobytes() for host in hosts} == {expected}
    return [reducer.layout.buckets[0].device.routes for reducer in ranks.reducers]


@pytest.mark.parametrize("compressor", [mpicomp.TopK(ratio=0.1), mpicomp.Dense(), mpicomp.OneBit()], ids=str)
def test_both_are_measured_and_all_ranks_have_the_same_table(compressor, cupy):
    first, second, third = run(cupy, compressor, 3, [True, True, True], [True, True, True])
    assert isinstance(first, RouteTable)
    assert first == second == third
    assert set(first.seconds) == set(first.sums) == {"direct", "staged"}
    assert all(len(times) == len(first.sizes) for seconds in (first.seconds, first.sums) for times in seconds.values())
    assert first.identical_sums


@pytest.mark.parametrize(
    ("on_device", "takes"), [([True, True], [True, False]), ([True, False], [False, True]), ([False] * 2, [True] * 2)]
)
def test_messages_are_staged_where_some_rank_must(on_device, takes, cupy):
    assert run(cupy, mpicomp.TopK(ratio=0.1), 2, on_device, takes) == [None, None]


def test_a_rank_on_the_host_takes_part(cupy):
    there, here = run(cupy, mpicomp.TopK(ratio=0.1), 2, [True, False], [True, False])
    assert isinstance(there, RouteTable)
    assert here is None


def test_a_library_that_adds_slowly_is_given_sums_in_host_memory(cupy):
    from mpicomp.device.cuda import CudaDevice
    from mpicomp.rounds import Round
    from mpicomp.transport.gpu_routes import faster_route

    device, single = CudaDevice(0), np.dtype("f4")
    device.routes = RouteTable((1,), {"direct": (1.0,), "staged": (2.0,)}, True, {"direct": (9.0,), "staged": (3.0,)})
    for operation, route in [("allreduce", "staged"), ("sendrecv", "direct"), ("bcast", "direct")]:
        array = device.zeros(4, single)
        assert faster_route(device, Round(operation, (4,), single, send=array, recv=array)) == route


def test_sums_that_differ_between_ranks_are_staged(cupy):
    """Of floating numbers; integers have one sum."""
    from mpicomp.device.cuda import CudaDevice
    from mpicomp.rounds import Round
    from mpicomp.transport.gpu_routes import faster_route

    device = CudaDevice(0)
    device.routes = RouteTable((1,), {"direct": (1.0,), "staged": (2.0,)}, identical_sums=False)
    for dtype, operation, route in [
        ("f4", "allreduce", "staged"),
        ("f4", "bcast", "direct"),
        ("u8", "allreduce", "direct"),
    ]:
        array = device.zeros(4, dtype)
        assert faster_route(device, Round(operation, (4,), np.dtype(dtype), send=array, recv=array)) == route
