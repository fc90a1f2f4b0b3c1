"""Rounds on arrays of a device that MPI is given as they are: it reads and writes memory that nobody else may look at.

The device's memory is the host's, so any MPI takes it. What is put into streams is done late, so what is not waited for
is rubbish; where the memory is guarded, code that touches it at another time dies (see `device.guarded`).
"""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from device import fake_cuda
from device.steps_on_a_device import gradients_of, host, on_host
from exchanges import LAYOUTS, at_once, in_the_background, of

import mpicomp
from mpicomp.gpu import routes as gpu_routes
from mpicomp.gpu.cuda import CudaDevice
from mpicomp.gpu.routes import RouteTable
from mpicomp.mpi.rounds import Returned, Round, advance
from mpicomp.reducer.layout import Layout

pytestmark = pytest.mark.mpi
DIRECT = RouteTable.always("direct")
slow = pytest.mark.slow  # what guarded memory and four kinds of messages leave over


@pytest.fixture
def guarded(monkeypatch):
    return fake_cuda.install(monkeypatch, "lazy", guarded=True)


@pytest.fixture(params=[pytest.param("0", marks=slow), "1"], ids=["blocking", "naps"])
def naps(request, monkeypatch):
    monkeypatch.setenv("MPICOMP_NAPS", request.param)


@contextlib.contextmanager
def opened(comm, limit=None):
    """Give a transport of each layout, with the layout."""
    from mpicomp.mpi.comm import COUNT_LIMIT, MPITransport

    layouts = LAYOUTS.get(comm.size, [[0] * comm.size])
    made = [(layout, MPITransport(comm, limit or COUNT_LIMIT, layout)) for layout in layouts]
    yield made
    for _, transport in made:
        transport.close()


WAYS = [("lazy", "0", None), ("lazy", "0", 9), ("random", "1", 9)]


@pytest.fixture(params=WAYS, ids=["whole", "cut to 9 bytes", "cut, naps"])
def transports(comm, monkeypatch, request):
    schedule, naps, limit = request.param
    monkeypatch.setenv("MPICOMP_NAPS", naps)
    fake_cuda.install(monkeypatch, schedule)
    with opened(comm, limit) as made:
        yield made


def on_the_device(gpu, exchange):
    """Run rounds on arrays of the host as rounds on arrays of a device, which are filled from these and copied back."""
    pending, reply = {}, None
    while not isinstance(asked := advance(exchange, reply), Returned):
        if not isinstance(asked, Round):
            reply = landed(gpu, pending.pop(asked), (yield asked))
            continue
        send, recv = (None if array is None else gpu.to_device(array) for array in (asked.send, asked.recv))
        if send is not None:
            send += 0  # the last change is a kernel's
        reply = yield replace(asked, send=send, recv=recv)
        if asked.background:
            pending[reply] = asked.recv
        else:
            reply = landed(gpu, asked.recv, reply)
    return asked.value


def landed(gpu, recv, there):
    if recv is None:
        return there
    assert isinstance(there, fake_cuda.ndarray)
    recv[:] = gpu.to_host(there)
    return recv


def directly(exchange):
    gpu = CudaDevice(0)
    return gpu_routes.run_on_device(gpu, on_the_device(gpu, exchange), DIRECT)


@pytest.mark.slow
def test_in_a_thread_during_other_rounds(transports, comm):
    from mpicomp.mpi.thread import ProgressThread

    layout, transport = transports[-1]
    with ProgressThread(transport) as thread:
        jobs = [thread.submit(directly(in_the_background(layout, comm.rank))) for _ in range(3)]
        rounds = transport.run(directly(at_once(layout, comm.rank, dtypes=[np.float32])))
        assert all(job.result(timeout=60) > 0 for job in jobs)
    assert rounds > 0


class Refusing:
    """A communicator whose non-blocking collectives end the process on memory of a device, as Open MPI's do."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name not in ("Iallreduce", "Iallgather", "Iallgatherv", "Ialltoallv", "Ibcast", "Igather", "Igatherv"):
            return found

        def call(*arguments):
            parts = [part for argument in arguments for part in (argument if type(argument) is list else [argument])]
            assert not any(isinstance(part, gpu_routes.DeviceBuffer) for part in parts), f"{name} of device memory"
            return found(*arguments)

        return call


@pytest.mark.parametrize("thread", [False, True], ids=["asleep", "in a thread"])
def test_collectives_on_memory_of_a_device_block(thread, cupy, comm, monkeypatch):
    """In a rank that shares its core, and in the thread that exchanges during backward."""
    from mpicomp.mpi.comm import MPITransport
    from mpicomp.mpi.thread import ProgressThread

    monkeypatch.setenv("MPICOMP_NAPS", "1")
    transport, rank = MPITransport(comm), comm.rank
    layout = [0] * comm.size
    exchange = directly(at_once(layout, rank, dtypes=[np.float32]))
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(ProgressThread(transport)) if thread else None
        running = transport if progress is None else progress._driver._transport
        for channel in running._front.values():
            channel.comm = Refusing(channel.comm)
        assert (transport.run(exchange) if progress is None else progress.submit(exchange).result(60)) > 0
        for channel in running._front.values():
            channel.comm = channel.comm._comm
    transport.close()


@pytest.mark.parametrize("numel", [0, 70_000, *(pytest.param(numel, marks=slow) for numel in (1, 200_001))])
def test_parts_are_worked_on_as_they_arrive(cupy, comm, naps, numel):
    from mpicomp.mpi.comm import MPITransport

    transport, gpu, parts = MPITransport(comm), CudaDevice(0), []
    rank, size = comm.rank, comm.size
    peers = ((rank + 1) % size, (rank - 1) % size)

    def exchange():
        send, recv = gpu.to_device(of(rank, numel, np.float64)), gpu.zeros(numel, np.float64)
        doubled = gpu.zeros(numel, np.float64)

        def arrived(start, stop):
            parts.append(stop - start)
            np.add(recv[start:stop], recv[start:stop], out=doubled[start:stop])

        yield Round("sendrecv", (numel, numel), send.dtype, 0, send, recv, peers=peers, arrived=arrived)
        return gpu.to_host(doubled)

    doubled = transport.run(gpu_routes.run_on_device(gpu, exchange(), DIRECT))
    np.testing.assert_array_equal(doubled, 2 * of((rank - 1) % size, numel, np.float64))
    assert sum(parts) == numel
    assert len(parts) > 1 or numel < 70_000
    transport.close()


def test_one_array_on_the_device_and_one_on_the_host(transports, comm):
    """What a rank copies to itself crosses between them, too."""
    size = comm.size

    def exchange(gpu, outward):
        for operation in ("alltoallv", "allgatherv", "bcast"):
            counts = [3] * (1 if operation == "bcast" else size)
            sent = 3 * size if operation == "alltoallv" else 3
            send = np.arange(sent, dtype=np.float32) + 100 * comm.rank
            recv = np.zeros(sum(counts), np.float32)
            there = gpu.to_device(send if outward else recv)
            task = Round(operation, counts, send.dtype, 0, *((there, recv) if outward else (send, there)))
            found = gpu.to_host((yield task))
            first = 3 * comm.rank if operation == "alltoallv" else 0
            rows = np.arange(first, first + 3) + 100 * np.arange(sum(counts) // 3)[:, None]
            np.testing.assert_array_equal(found, rows.reshape(-1))

    for outward in (True, False):
        for _, transport in transports:
            gpu = CudaDevice(0)
            transport.run(gpu_routes.run_on_device(gpu, exchange(gpu, outward), DIRECT))


SHAPES = {"first": (40, 25), "second": (7,), "third": (3, 5, 2)}
STEPS = 3
KINDS = [
    (mpicomp.Dense(), "allreduce"),
    (mpicomp.Dense(), "ring"),
    (mpicomp.Dense(wire="bf16"), "scatter-reduce"),
    (mpicomp.TopK(ratio=0.1), "allgather"),
    (mpicomp.TopK(ratio=0.1), "star-topk"),
    (mpicomp.OneBit(block=64), "two-phase"),
    (mpicomp.PowerSGD(rank=1), "low-rank"),
]


def reduced(comm, compressor, collective, move):
    """Return the means of all steps and the residuals after each."""
    reducer = mpicomp.Reducer(compressor, collective, comm=comm, feedback=None if compressor.contractive else False)
    results = []
    for step in range(STEPS):
        gradients = gradients_of(comm.rank, step, SHAPES)
        means = reducer.reduce({name: move(gradient) for name, gradient in gradients.items()})
        results.append({name: on_host(mean) for name, mean in means.items()})
        results.append({name: reducer.residual(name).copy() for name in SHAPES})
    reducer.close()
    return results


def compare(cupy, comm, compressor, collective, monkeypatch):
    staged, direct = [], []
    monkeypatch.setattr(Layout, "routes", property(lambda layout: DIRECT, lambda layout, measured: None), raising=False)
    for kind, made in ((gpu_routes.StagedRound, staged), (gpu_routes.DirectRound, direct)):
        begin = kind.__init__
        monkeypatch.setattr(kind, "__init__", lambda *a, begin=begin, made=made: (made.append(0), begin(*a))[1])
    expected = reduced(comm, compressor, collective, host)
    assert not direct
    np.testing.assert_equal(reduced(comm, compressor, collective, cupy.asarray), expected)
    assert direct or comm.size == 1
    assert not staged


FEW = ("ring", "allgather", "two-phase")


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [pytest.param(*kind, marks=[] if kind[1] in FEW else [slow]) for kind in KINDS],
    ids=str,
)
def test_nobody_but_kernels_and_rounds_touches_the_device(compressor, collective, guarded, comm, monkeypatch):
    compare(guarded, comm, compressor, collective, monkeypatch)


def test_no_operation_touches_what_was_not_lent(guarded, comm):
    with opened(comm) as transports:
        layout, transport = transports[-1]
        transport.run(directly(at_once(layout, comm.rank, dtypes=[np.uint32])))
        assert transport.run(directly(in_the_background(layout, comm.rank))) > 0
