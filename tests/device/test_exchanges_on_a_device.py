"""Exchanges with arrays on a device: means and residuals have the bits of the host, and copies are messages alone.

Kernels are those of the host, or those of CUDA, emulated. Statistics that are sums in float64 have another order on a
GPU, so selections by them may differ, and with them means: for these the law is tested, and that all ranks hold the
same bits.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
from device import fake_cuda
from device.steps_on_a_device import fetched, gradients_of, host, ranks_of, reduced
from marks import slow
from mpicomp.kernels import gpu
from schemes import OTHER_PAIRS, REPRESENTED
from worlds import Ranks

import mpicomp
from mpicomp.gpu.cuda import CudaDevice
from mpicomp.gpu.routes import DeviceBuffer, RouteTable

SHAPES = {"first": (40, 25), "second": (7,), "third": (3, 5, 2)}
STEPS = 3
NUMEL = 40_000  # of arrays whose copies are counted


@pytest.fixture(params=["lazy", slow("random")])
def late_cupy(request, emulated, monkeypatch):
    """With kernels of CUDA, which run when somebody waits for them."""
    return fake_cuda.install(monkeypatch, request.param, emulated=True)


def run(compressor, collective, size, move, copied=lambda: 0, **settings):
    """Return the means and residuals of all steps; a step copies no more to the host than it sends.

    A rank copies its message to itself too, and some hundred bytes of numbers: a gradient has 4 kB. Ok-Topk copies
    its selection, and the sum at indices that were delivered.
    """
    numel = sum(array.size for array in gradients_of(0, 0, SHAPES).values())
    more = 12 * compressor.expected(numel) if collective == "oktopk" else 0
    ranks, results = ranks_of(size, compressor, collective, **settings), []
    for step in range(STEPS):
        before = copied()
        means = reduced(ranks, [gradients_of(rank, step, SHAPES) for rank in range(size)], move)
        sent = sum(reducer.last_step.buckets[0].sent_bytes for reducer in ranks.reducers)
        assert copied() - before <= 1.5 * sent + (512 + more) * size
        if move is not host:
            assert all(isinstance(mean, fake_cuda.ndarray) for rank in means for mean in rank.values())
        results.append((fetched(means), {name: ranks.residuals(name) for name in SHAPES}))
    return results


def compare(compressor, collective, cupy, size=3, **settings):
    copied = (lambda: cupy.driver.to_host_bytes) if cupy.driver.schedule == "eager" else lambda: 0
    found = run(compressor, collective, size, cupy.asarray, copied, **settings)
    np.testing.assert_equal(found, run(compressor, collective, size, host, **settings))


ON_HOSTS = [
    (mpicomp.Dense(), "hierarchical:ring"),
    (mpicomp.Dense(wire="bf16"), "hierarchical"),
    (mpicomp.TopK(ratio=0.1), "hierarchical:allgather"),
    (mpicomp.TopK(ratio=0.1, wire="fp16"), "hierarchical:star-topk"),
    (mpicomp.OneBit(block=64), "hierarchical:packed-allgather"),
    (mpicomp.QSGD(rounding="nearest"), "hierarchical"),
]


@pytest.mark.parametrize(
    ("compressor", "collective", "hosts"),
    [
        *((*pair, [0, 0, 0]) for pair in REPRESENTED),
        *(slow(*pair, [0, 0, 0]) for pair in OTHER_PAIRS),
        *((*pair, hosts) for pair in ON_HOSTS for hosts in ([0, 0, 1], [0, 1, 0, 0])),
    ],
    ids=str,
)
def test_exchanges_have_the_bits_of_the_host(compressor, collective, hosts, eager):
    compare(compressor, collective, eager, len(hosts), hosts=hosts if any(hosts) else None)


SAME_BITS = [
    slow(mpicomp.Dense(), "allreduce"),
    slow(mpicomp.Dense(wire="bf16"), "scatter-reduce"),
    slow(mpicomp.Dense(), "ring"),
    (mpicomp.TopK(ratio=0.1), "allgather"),
    (mpicomp.TopK(ratio=0.1, wire="fp16", indices="plain"), "allgather"),
    (mpicomp.TopK(ratio=0.5, wire="q4"), "allgather"),
    slow(mpicomp.TopK(ratio=0.1), "star-topk"),
    slow(mpicomp.TopK(ratio=0.1), "oktopk"),
    slow(mpicomp.RandomK(ratio=0.1), "allreduce"),
    slow(mpicomp.QSGD(rounding="nearest"), "packed-allgather"),
    (mpicomp.OneBit(block=64), "packed-allgather"),
    (mpicomp.MaxNorm(bits=8, rounding="nearest"), "packed-allgather"),
    slow(mpicomp.SignSGD(), "packed-allgather"),
]
LAWS = [
    (mpicomp.TopK(ratio=0.1, wire="signs"), "allgather"),
    slow(mpicomp.OneBit(block=64), "two-phase"),
    (mpicomp.SIDCo(ratio=0.1), "allgather"),
    (mpicomp.SIDCo(ratio=0.1, indices="elias-fano"), "allgather"),
    slow(mpicomp.PowerSGD(rank=1), "low-rank"),
]


@pytest.mark.parametrize(("compressor", "collective"), SAME_BITS, ids=str)
def test_emulated_kernels_have_the_bits_of_the_host(compressor, collective, late_cupy):
    compare(compressor, collective, late_cupy, 2)


@pytest.mark.parametrize(("compressor", "collective"), LAWS, ids=str)
def test_emulated_kernels_lose_nothing(compressor, collective, late_cupy):
    size, before = 2, {name: np.zeros((2, *shape)) for name, shape in SHAPES.items()}
    for step, (means, after) in enumerate(run(compressor, collective, size, late_cupy.asarray)):
        np.testing.assert_equal(means[0], means[1])
        for name in SHAPES:
            gradients = np.array([gradients_of(rank, step, SHAPES)[name] for rank in range(size)], np.float64)
            held = (gradients + before[name]).sum(axis=0) - size * means[0][name].astype(np.float64)
            np.testing.assert_allclose(held, np.sum(after[name], axis=0, dtype=np.float64), rtol=0, atol=2e-5)
            before[name] = np.array(after[name], np.float64)


# Copies between device and host, reads of numbers, and launches.


def counted(
    cupy, compressor, collective, size=2, parameters=1, route="staged", shape=(-1,), steady=lambda: None, views=False,
    steps=STEPS,
):  # fmt: skip
    """Return bytes up and down, reads, launches and bytes of the message in the last step, each by rank.

    With ``views`` gradients lie in their buckets.
    """
    ranks, driver = ranks_of(size, compressor, collective), cupy.driver
    for reducer in ranks.reducers:
        reducer.layout.holds_gradients = views
    rng, names = np.random.default_rng(0), [str(number) for number in range(parameters)]
    gradients = [
        {name: cupy.empty(NUMEL // parameters, np.float32).reshape(shape) for name in names} for _ in range(size)
    ]
    for step in range(steps):
        for array in (rank[name] for rank in gradients for name in names):  # in place, as frameworks do it
            array._host[:] = rng.laplace(size=array.shape)
        if step == steps - 1:  # memory is allocated and bounds are known by now
            driver.to_host_bytes = driver.from_host_bytes = 0
            cupy.launches.clear()
            steady()
            [device] = {reducer.layout.buckets[0].device for reducer in ranks.reducers}
            assert isinstance(device, CudaDevice)
            for reducer in ranks.reducers:
                reducer.layout.routes = RouteTable.always(route)
            before = cupy.reads + device.reads
        ranks.reduce(gradients)
        if views:
            gradients = [{name: reducer.layout.gradient(name) for name in names} for reducer in ranks.reducers]
    sent = sum(reducer.last_step.buckets[0].sent_bytes for reducer in ranks.reducers)
    reads = cupy.reads + device.reads - before
    return [number / size for number in (driver.to_host_bytes, driver.from_host_bytes, reads, len(cupy.launches), sent)]


@pytest.fixture
def mpi_reads_the_device(monkeypatch):
    """Let the transport use memory of the device as MPI does, which copies nothing to the host for it."""

    def write(self, part, values):
        self._array._host[part] = np.asarray(values)

    monkeypatch.setattr(DeviceBuffer, "__array__", lambda self, dtype=None, copy=None: self._array._host.copy())
    monkeypatch.setattr(DeviceBuffer, "__setitem__", write)


TOPK, SIDCO, GATHER, PACKED = mpicomp.TopK(ratio=0.01), mpicomp.SIDCo(ratio=0.01), "allgather", "packed-allgather"
COPIED = [  # settings, and of a rank at most: waits, launches, messages to the host, messages to the GPU
    (TOPK, GATHER, {"size": 3}, 1, 8, 1, 3),
    (TOPK, GATHER, {"size": 3, "parameters": 5}, 1, 9, 1, 3),
    (TOPK, GATHER, {"parameters": 5, "views": True}, 1, 8, 1, 2),
    (SIDCO, GATHER, {}, 1, 18, 1.5, 2),  # the device alone has counted: the host copies as much as is likely
    slow(SIDCO, GATHER, {"parameters": 5}, 1, 19, 1.5, 2),
    (mpicomp.OneBit(), PACKED, {}, 0, 3, 1, 2),
    (mpicomp.OneBit(), PACKED, {"parameters": 5}, 0, 3, 1, 2),
    (mpicomp.Dense(), "allreduce", {"size": 3}, 1, 6, 1, 1),
    (mpicomp.QSGD(), PACKED, {}, 1, 8, 1, 2),
    (mpicomp.PowerSGD(rank=2), "auto", {"shape": (200, 200)}, 4, 40, 1, 1),
    # The host has to know the length of selections by estimated thresholds before it sends them.
    slow(mpicomp.DGC(ratio=0.01), GATHER, {}, 8, 24, 1, 2),
    (mpicomp.RedSync(ratio=0.01), GATHER, {}, 8, 24, 1, 2),
    slow(mpicomp.GaussianK(ratio=0.01), GATHER, {}, 8, 24, 1, 2),
    slow(mpicomp.MSTopK(ratio=0.01), GATHER, {}, 32, 64, 1, 2),
]


@pytest.mark.parametrize(("compressor", "collective", "settings", "reads", "launches", "up", "down"), COPIED, ids=str)
def test_messages_are_copied_once(compressor, collective, settings, reads, launches, up, down, emulated_cupy):
    found_up, found_down, found_reads, found_launches, sent = counted(emulated_cupy, compressor, collective, **settings)
    assert sent <= found_up <= up * sent + 128  # some numbers go with them
    assert down * sent <= found_down <= down * sent + 128
    assert found_reads <= reads
    assert found_launches <= launches


def test_a_message_that_is_longer_than_expected_is_copied_again(emulated_cupy, monkeypatch):
    monkeypatch.setattr(mpicomp.SIDCo, "expected", lambda compressor, numel: 10)
    up, down, reads, _, sent = counted(emulated_cupy, SIDCO, GATHER)
    assert sent <= up <= sent + 128
    assert 2 * sent <= down <= 2 * sent + 128
    assert reads == 1


@pytest.mark.parametrize(
    ("compressor", "collective", "most"),
    [
        (mpicomp.Dense(), "allreduce", 1.3),
        (mpicomp.TopK(ratio=0.01), "allgather", 2.3),
        (mpicomp.SIDCo(ratio=0.01), "allgather", 2.6),  # counters take 16 KiB of 160
        (mpicomp.QSGD(bits=4, rounding="nearest"), "packed-allgather", 2.5),
    ],
    ids=str,
)
def test_memory_is_that_of_gradient_and_residual(compressor, collective, most, emulated_cupy, torch_memory):
    """In gradients, which lie in their buckets and are counted, for each of two ranks."""
    held, note = [], lambda: held.append(torch_memory.held)
    counted(emulated_cupy, compressor, collective, views=True, steps=6, steady=note)  # the first ones take more
    assert held[0] / (2 * 4 * NUMEL) <= most


@pytest.mark.parametrize("parameters", [1, slow(5)])
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        (mpicomp.TopK(ratio=0.01), "allgather"),
        (mpicomp.SIDCo(ratio=0.01), "allgather"),
        (mpicomp.QSGD(bits=4), "packed-allgather"),
        (mpicomp.OneBit(), "packed-allgather"),
    ],
    ids=str,
)
def test_a_steady_step_allocates_nothing(compressor, collective, parameters, emulated_cupy, monkeypatch):
    """Numbers that launches leave, tables and bounds are written where those of earlier steps were."""
    made = []

    def counting(name):
        work = getattr(emulated_cupy, name)
        return lambda *arguments: (made.append((name, *arguments)), work(*arguments))[1]

    for name in ("empty", "compute"):  # the latter for kernels of CuPy's
        monkeypatch.setattr(emulated_cupy, name, counting(name))
    counted(emulated_cupy, compressor, collective, parameters=parameters, steady=made.clear)
    assert not made


@pytest.mark.parametrize("size", [slow(2), 3])
def test_topk_on_the_direct_route_copies_nothing(size, emulated_cupy, mpi_reads_the_device, monkeypatch):
    """The host waits for the message, for the headers of all ranks together, and for numbers."""
    waits, wait = [], CudaDevice.wait
    monkeypatch.setattr(CudaDevice, "wait", lambda device: (waits.append(device), wait(device))[1])
    topk = mpicomp.TopK(ratio=0.01), "allgather"
    up, down, reads, _, _ = counted(emulated_cupy, *topk, size, route="direct", steady=waits.clear)
    assert len(waits) == 3 * size
    assert up <= 64 + 24 * size
    assert down == 0
    assert reads <= 1


def test_one_bit_writes_its_mean_over_whatever_is_there(emulated_cupy, monkeypatch):
    fill, filled = fake_cuda.ndarray.fill, []
    monkeypatch.setattr(fake_cuda.ndarray, "fill", lambda array, value: (filled.append(array.size), fill(array, value)))
    counted(emulated_cupy, mpicomp.OneBit(), PACKED)
    assert filled.count(NUMEL) <= 2  # the residual of each rank, before the first step


def test_only_sources_that_run_are_compiled_and_once(emulated_cupy, monkeypatch):
    """Two ranks of a process and three steps: a source for every kind of kernel, for float32 alone."""
    texts, compiled = {path.stem: path.read_text() for path in Path(gpu.__file__).parent.glob("*.cu")}, []

    def compile_source(code, options, make=emulated_cupy.RawModule):
        compiled.append([name for name, text in texts.items() if code.endswith(text)] + [options[-1]])
        return make(code, options)

    monkeypatch.setattr(emulated_cupy, "RawModule", compile_source)
    counted(emulated_cupy, mpicomp.OneBit(), "packed-allgather", 2)
    assert sorted(compiled) == [["message", "-DREAL=float"], ["signs", "-DREAL=float"]]


def test_sources_of_a_compressor_are_compiled_in_parallel(emulated_cupy, monkeypatch):
    """Each waits for all others to be begun."""
    sources = mpicomp.TopK.gpu_sources
    make, meeting, compiled = emulated_cupy.RawModule, threading.Barrier(len(sources), timeout=60), []

    def compile_source(code, options):
        meeting.wait()
        compiled.append(code)
        return make(code, options)

    monkeypatch.setattr(emulated_cupy, "RawModule", compile_source)
    counted(emulated_cupy, mpicomp.TopK(ratio=0.01), "allgather", 2)
    assert len(set(compiled)) == len(compiled) == len(sources)


# Routes: measured where the MPI of every rank takes device memory, the same on all ranks.


def routes_of(cupy, compressor, size, on_device, takes):
    """Return the route tables of ranks with arrays on a device or not, whose MPI takes them or not."""
    ranks = Ranks(size, compressor)
    for transport, takes_memory in zip(ranks.world.transports, takes, strict=True):
        transport.takes_device_memory = takes_memory
    gradients = [gradients_of(rank, 0, {"w": 3000}) for rank in range(size)]
    moved = [
        {"w": cupy.asarray(rank["w"]) if there else rank["w"]} for rank, there in zip(gradients, on_device, strict=True)
    ]
    [expected] = {rank["w"].tobytes() for rank in Ranks(size, compressor).reduce(gradients)}
    assert {rank["w"].tobytes() for rank in fetched(ranks.reduce(moved))} == {expected}
    return [reducer.layout.routes for reducer in ranks.reducers]


@pytest.mark.parametrize("compressor", [mpicomp.TopK(ratio=0.1), mpicomp.Dense(), mpicomp.OneBit()], ids=str)
def test_both_routes_are_measured_and_ranks_have_one_table(compressor, eager):
    first, second, third = routes_of(eager, compressor, 3, [True, True, True], [True, True, True])
    assert isinstance(first, RouteTable)
    assert first == second == third
    assert set(first.seconds) == set(first.sums) == {"direct", "staged"}
    assert all(len(times) == len(first.sizes) for table in (first.seconds, first.sums) for times in table.values())
    assert first.identical_sums


@pytest.mark.parametrize(
    ("on_device", "takes"),
    [([True, True], [True, False]), ([True, False], [True, True]), ([False, False], [True, True])],
)
def test_messages_are_staged_where_some_rank_must(on_device, takes, eager):
    """All ranks make the same calls, and those for memory of a device are others."""
    assert routes_of(eager, mpicomp.TopK(ratio=0.1), 2, on_device, takes) == [None, None]


@pytest.mark.parametrize(
    ("identical", "operation", "dtype", "route"),
    [
        # A library that adds slowly in device memory, and one whose sums differ between ranks.
        (True, "allreduce", "f4", "staged"),
        (True, "sendrecv", "f4", "direct"),
        (True, "bcast", "f4", "direct"),
        (False, "allreduce", "f4", "staged"),
        (False, "bcast", "f4", "direct"),
        (False, "allreduce", "u8", "direct"),
    ],
)
def test_sums_that_are_slow_or_differ_are_staged(identical, operation, dtype, route):
    from mpicomp.mpi.rounds import Round

    sums = {"direct": (9.0,), "staged": (3.0,)} if identical else None
    routes = RouteTable((1,), {"direct": (1.0,), "staged": (2.0,)}, sums, identical)
    assert routes.route_of(Round(operation, (4,), np.dtype(dtype))) == route
