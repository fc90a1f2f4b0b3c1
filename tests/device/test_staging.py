"""Arrays of a GPU without CuPy through a reducer: copied to the host whole."""

import threading

import numpy as np
import pytest
from device import fake_cuda

import mpicomp
from mpicomp import Reducer, TopK
from mpicomp.device import cuda
from mpicomp.device import driver as device
from mpicomp.errors import ArrayTypeError, NonFiniteError
from mpicomp.reducer import layout
from mpicomp.transport import LocalWorld
from mpicomp.transport.scheduler import ProgressThread


@pytest.fixture
def cupy(monkeypatch):
    """Return a library whose arrays are taken for those of CuPy by a mpicomp that finds no CuPy."""
    monkeypatch.setattr(cuda, "_has_cupy", lambda: False)
    return fake_cuda.install(monkeypatch, "lazy")


def alone(**settings):
    return Reducer("dense", comm=LocalWorld(1).transports[0], **settings)


def reduce_on_all(world, reducers, gradients):
    pairs = zip(reducers, gradients, strict=True)
    return world.run([reducer.rounds({"w": gradient}) for reducer, gradient in pairs])


@pytest.mark.parametrize("stream", [1, 2, "new"])
def test_what_is_still_computed_is_waited_for(cupy, stream):
    number = cupy.driver.stream(0) if stream == "new" else stream
    reducer = alone()
    with cupy.stream(number):
        for step in range(3):
            values = np.arange(5, dtype=np.float32) + step
            mean = reducer.reduce({"w": cupy.asarray(values)})["w"]
            np.testing.assert_array_equal(mean.get(), values)
    reducer.close()


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_that_name_no_stream(cupy, version):
    """Version 2 knows none, so the legacy stream is waited for; with None there is nothing to wait for."""
    array = cupy.asarray(np.arange(6, dtype=np.float32))
    cupy.version = version
    with cupy.stream(None):
        assert device.streams_of([array]) == ({1} if version == 2 else set())


def test_stream_0_is_refused(cupy):
    array = cupy.asarray(np.ones(3, np.float32))
    expected = r"device: .* must name its stream as None, 1, 2 or an address, got 0"
    with cupy.stream(0), pytest.raises(ArrayTypeError, match=expected):
        device.streams_of([array])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("ranks", [2, 5])
def test_the_same_as_on_the_host(cupy, dtype, ranks):
    shapes = {"matrix": (7, 9), "scalar": (), "long": (301,), "empty": (0, 3)}
    rng = np.random.default_rng(ranks)
    worlds = [LocalWorld(ranks) for _ in range(2)]
    reducers = [
        [Reducer(TopK(ratio=0.3), comm=end, bucket_bytes=600, policy={"warmup": 0}) for end in world.transports]
        for world in worlds
    ]
    for _ in range(4):
        gradients = [
            {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()} for _ in range(ranks)
        ]
        staged = [{name: cupy.asarray(gradient) for name, gradient in mine.items()} for mine in gradients]
        expected, means = (
            world.run([reducer.rounds(mine) for reducer, mine in zip(some, inputs, strict=True)])
            for world, some, inputs in zip(worlds, reducers, (gradients, staged), strict=True)
        )
        for ours, theirs in zip(means, expected, strict=True):
            assert list(ours) == list(theirs)
            for name in shapes:
                assert isinstance(ours[name], cupy.ndarray)
                assert ours[name].dtype == dtype
                np.testing.assert_array_equal(ours[name].get(), theirs[name])


def test_gradients_are_not_modified(cupy):
    values = np.linspace(-1, 1, 11, dtype=np.float32)
    gradient = cupy.asarray(values)
    alone().reduce({"w": gradient})
    np.testing.assert_array_equal(gradient.get(), values)


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array.transpose(),
        lambda array: array[::-1, ::2],
        lambda array: array[1:2],
        lambda array: array[:, 3],
        lambda array: array[2:, ::-3],
    ],
)
def test_strides(cupy, view):
    values = np.arange(42, dtype=np.float32).reshape(6, 7)
    whole = cupy.asarray(values)
    mean = alone().reduce({"w": view(whole)})["w"]
    np.testing.assert_array_equal(mean.get(), view(values))


def counted_copies(monkeypatch):
    """Return a list to which each copy of a gradient adds its thread."""
    copying, to_host = [], layout.to_host
    monkeypatch.setattr(layout, "to_host", lambda array: (copying.append(threading.get_ident()), to_host(array))[1])
    return copying


def test_gradients_are_copied_by_the_thread_that_passes_them(cupy, monkeypatch):
    """Its stream is the one to wait for, and not that of the thread that exchanges."""
    reducer = alone(bucket_bytes=40)
    reducer.reduce({name: cupy.asarray(np.zeros(10, np.float32)) for name in "ab"})
    copying = counted_copies(monkeypatch)
    gradients = {name: cupy.empty(10, np.float32) for name in "ab"}
    with ProgressThread(reducer.transport, channels=1) as thread, cupy.stream(cupy.driver.stream(0)):
        stream = reducer.stream(thread)
        for name, gradient in gradients.items():
            gradient.fill(7)
            stream.put(name, gradient)
        means = stream.finish(gradients)
        assert [means[name].get().tolist() for name in "ab"] == [[7] * 10] * 2
    assert copying == [threading.get_ident()] * 2


def test_every_array_is_copied_once(cupy, monkeypatch):
    reducer = Reducer(mpicomp.DGC(ratio=0.5, clip=1.0), "allgather", comm=LocalWorld(1).transports[0])  # looks twice
    gradients = {name: cupy.asarray(np.ones(50, np.float32)) for name in "abc"}
    reducer.reduce(gradients)
    copying = counted_copies(monkeypatch)
    reducer.reduce(gradients)
    assert len(copying) == 3


def test_a_step_that_is_undone(cupy):
    world = LocalWorld(2)
    reducers = [Reducer(TopK(ratio=0.5), "allgather", comm=end) for end in world.transports]
    good = [cupy.asarray(np.array([4, 1], np.float32)) for _ in range(2)]
    reduce_on_all(world, reducers, good)
    with pytest.raises(NonFiniteError):
        reduce_on_all(world, reducers, [cupy.asarray(np.array([np.nan, 1], np.float32)), good[0]])
    np.testing.assert_array_equal(reducers[0].residual("w"), [0, 1])
    means = reduce_on_all(world, reducers, good)
    assert means[1]["w"].get().tolist() == [4, 0]


def test_arrays_of_the_host_cost_nothing(cupy):
    reducer = alone()
    mean = reducer.reduce({"w": np.ones(3, np.float32)})["w"]
    assert isinstance(mean, np.ndarray)
    assert cupy.driver.allocated == cupy.driver.waits == 0


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("compressor", "collective"), [("dense", "allreduce"), ({"id": "topk", "ratio": 0.25}, "allgather")]
)
def test_over_mpi(cupy, comm, compressor, collective):
    """MPI is given host memory alone: a device's would be read before it is written."""
    reducer = Reducer(compressor, collective, comm=comm)
    rng = np.random.default_rng(0)
    residuals = np.zeros((comm.size, 40), np.float32)
    number = cupy.driver.stream(0)
    with cupy.stream(number):
        for _ in range(3):
            everyones = rng.normal(size=(comm.size, 40)).astype(np.float32)
            mean = reducer.reduce({"w": cupy.asarray(everyones[comm.rank])})["w"].get()
            accumulated = everyones + residuals
            if compressor != "dense":
                sent = np.zeros_like(accumulated)
                for row, out in zip(accumulated, sent, strict=True):
                    top = np.argsort(-np.abs(row), kind="stable")[:10]
                    out[top] = row[top]
                residuals = accumulated - sent
                accumulated = sent
            np.testing.assert_allclose(mean, accumulated.mean(0), rtol=1e-5, atol=1e-6)
    reducer.close()
