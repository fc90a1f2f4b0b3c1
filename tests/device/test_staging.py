"""Arrays of a device through a reducer: staged, in the order of streams, and without MPI ever seeing their memory."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from device import fake_cuda

import mpicomp
from mpicomp import Reducer, TopK
from mpicomp.device import MeanPart, cuda
from mpicomp.device import driver as device
from mpicomp.errors import ArrayTypeError, MpicompError, NonFiniteError
from mpicomp.transport import LocalWorld, staging
from mpicomp.transport.scheduler import ProgressThread
from mpicomp.transport.staging import Staging


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


def test_another_stream_is_not_what_the_array_says(cupy):
    """What is put into a stream that the array does not name is not there yet."""
    reducer = alone()
    with cupy.stream(cupy.driver.stream(0)):
        array = cupy.asarray(np.ones(5, np.float32))
    mean = reducer.reduce({"w": array})["w"]
    assert (mean.get() != 1).all()


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_that_name_no_stream(cupy, version):
    """Version 2 knows none, so the legacy stream is waited for; with None there is nothing to wait for."""
    values = np.arange(6, dtype=np.float32)
    array = cupy.asarray(values)
    cupy.version = version
    if version == 3:
        array.get()
    with cupy.stream(None):
        assert device.streams_of([array]) == ({1} if version == 2 else set())
        np.testing.assert_array_equal(Staging().host("w", array), values)


def test_stream_0_is_refused(cupy):
    array = cupy.asarray(np.ones(3, np.float32))
    with (
        cupy.stream(0),
        pytest.raises(ArrayTypeError, match=r"device: .* must name its stream as None, 1, 2 or an address, got 0"),
    ):
        alone().reduce({"w": array})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("ranks", [2, 5])
def test_the_same_as_on_the_host(cupy, monkeypatch, dtype, ranks):
    monkeypatch.setattr(staging, "CHUNK", 64)  # so that there are many
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


def test_nothing_is_allocated_in_the_steady_state(cupy):
    reducer = alone(bucket_bytes=64)
    gradients = {name: cupy.asarray(np.ones(50, np.float32)) for name in "abc"}
    means = reducer.reduce(gradients)
    allocated, events = cupy.driver.allocated, len(cupy.driver.events)
    for _ in range(3):
        again = reducer.reduce(gradients)
        assert all(again[name] is means[name] for name in gradients)
    assert (cupy.driver.allocated, len(cupy.driver.events)) == (allocated, events)


def test_every_array_is_copied_once_each_way(cupy):
    reducer = Reducer(mpicomp.DGC(ratio=0.5, clip=1.0), "allgather", comm=LocalWorld(1).transports[0])  # looks twice
    gradients = {name: cupy.asarray(np.ones(50, np.float32)) for name in "abc"}
    before = cupy.driver.from_host_bytes
    reducer.reduce(gradients)  # agrees, and comes to the gradients again
    assert cupy.driver.to_host_bytes == cupy.driver.from_host_bytes - before == 600


def test_later_buckets_are_copied_before_the_first_one_travels(cupy):
    """All copies are in the stream before the first round; the first bucket waits for its copies alone."""
    reducer = alone(bucket_bytes=40)
    gradients = {name: cupy.asarray(np.full(10, place, np.float32)) for place, name in enumerate("abcd")}
    reducer.reduce(gradients)
    before = cupy.driver.to_host_bytes, cupy.driver.waits
    rounds = reducer.rounds(gradients)
    asked = next(rounds)
    while asked.operation != "allreduce":
        asked = rounds.send(asked.recv)
    assert cupy.driver.to_host_bytes - before[0] == 160
    assert cupy.driver.waits - before[1] == 1
    rounds.close()


def test_chunks_are_under_way_together(cupy, monkeypatch):
    """One is filled while others travel; only a chunk that is to be used again is waited for."""
    monkeypatch.setattr(staging, "CHUNK", 40)
    array = cupy.empty(10 * staging.CHUNKS + 5, np.float32)
    mean = np.arange(array.shape[0], dtype=np.float32)
    [given] = Staging().unflatten(
        mean, [MeanPart(0, mpicomp.arrays.ArraySpec("w", "float32", array.shape), array, None)]
    )
    left = sum(callable(work) for work in cupy.driver.streams[1])
    assert left == staging.CHUNKS
    np.testing.assert_array_equal(given.get(), mean)


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


def test_arrays_that_grow_or_move(cupy):
    array_staging = Staging()
    for where, size in ((0, 4), (0, 9), (1, 9), (1, 2)):
        array_staging.begin()
        cupy.current_device = where
        values = np.arange(size, dtype=np.float32)
        array = cupy.asarray(values)
        np.testing.assert_array_equal(array_staging.host("w", array), values)
        described = mpicomp.arrays.ArraySpec("w", "float32", (size,))
        [given] = array_staging.unflatten(values + 1, [MeanPart(0, described, array, None)])
        assert given.device == array.device
        np.testing.assert_array_equal(given.get(), values + 1)
    array_staging.close()


def test_the_array_is_let_go_when_it_is_there(cupy):
    array_staging = Staging()
    array = cupy.asarray(np.ones(3, np.float32))
    array.get()  # what writes to it holds it, too
    before = sys.getrefcount(array)
    array_staging.start("w", array)
    assert sys.getrefcount(array) > before  # else its memory could go while it is copied
    array_staging.host("w", array)
    assert sys.getrefcount(array) == before


def test_a_stream_of_the_thread_that_hands_over(cupy):
    """The thread that exchanges has another current stream; it must not be asked."""
    reducer = alone(bucket_bytes=40)
    first = {name: cupy.asarray(np.zeros(10, np.float32)) for name in "ab"}
    reducer.reduce(first)
    number = cupy.driver.stream(0)
    gradients = {name: cupy.empty(10, np.float32) for name in "ab"}
    main = threading.get_ident()
    asked = []
    seen = device.streams_of

    def watched(arrays):
        asked.append(threading.get_ident())
        return seen(arrays)

    with (
        ProgressThread(reducer.transport, channels=1) as thread,
        cupy.stream(number),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(device, "streams_of", watched)
        stream = reducer.stream(thread)
        for name, gradient in gradients.items():
            gradient.fill(7)
            stream.put(name, gradient)
        means = stream.finish(gradients)
        assert [means[name].get().tolist() for name in "ab"] == [[7] * 10] * 2
    assert set(asked) == {main}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["plain", "transposed", "expanded"])
def test_tensors_of_torch(cupy, monkeypatch, dtype, kind):
    """Tensors of the host that say they are not: all but CUDA is real."""
    torch = pytest.importorskip("torch")

    held = []

    class Tensor(torch.Tensor):
        is_cuda = True

    def on_device(tensor):
        held.append(tensor)  # while copies are under way
        cupy.driver.on_device[tensor.data_ptr()] = tensor.nbytes, 0
        return tensor.as_subclass(Tensor)

    empty = lambda like: on_device(torch.full(like.shape, torch.nan, dtype=like.dtype))  # noqa: E731
    monkeypatch.setattr(staging, "empty_like", empty)
    number = cupy.driver.stream(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: SimpleNamespace(cuda_stream=number))
    values = torch.randn((4, 6), generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    gradient = on_device(torch.zeros_like(values))
    whole, written = gradient, values
    cupy.driver.put(number, lambda: whole.copy_(written))
    if kind == "transposed":
        gradient, values = gradient.T, values.T
    elif kind == "expanded":
        gradient, values = gradient[:, :1].expand(4, 9), values[:, :1].expand(4, 9)
    mean = alone().reduce({"w": gradient})["w"]
    assert isinstance(mean, Tensor)
    assert not torch.equal(mean, values)  # it comes when the stream comes to it
    cupy.driver.finish(number)
    assert torch.equal(mean.as_subclass(torch.Tensor), values)


def test_without_the_driver_the_library_copies(cupy, monkeypatch):
    array = cupy.asarray(np.ones(2, np.float32))
    monkeypatch.setattr(device, "driver", lambda: None)
    monkeypatch.setattr(cupy, "asarray", lambda host: ("on the device", host.tolist()), raising=False)
    assert alone().reduce({"w": array})["w"] == ("on the device", [1, 1])


def test_arrays_of_the_host_cost_nothing(cupy):
    reducer = alone()
    mean = reducer.reduce({"w": np.ones(3, np.float32)})["w"]
    assert isinstance(mean, np.ndarray)
    assert cupy.driver.allocated == cupy.driver.waits == 0


def test_what_the_driver_says_reaches_all_ranks(cupy):
    """A fault of one rank travels before data does."""
    world = LocalWorld(2)
    reducers = [Reducer("dense", comm=end) for end in world.transports]
    gradients = [cupy.asarray(np.ones(3, np.float32)) for _ in range(2)]
    del cupy.driver.on_device[gradients[1].data.ptr]

    def failing(address, found=cupy.driver.device_of):
        try:
            return found(address)
        except RuntimeError as error:
            raise MpicompError(f"device: {error}") from None

    cupy.driver.device_of = failing
    with pytest.raises(MpicompError, match=r"is no address of a device \(on rank 1\)") as raised:
        reduce_on_all(world, reducers, gradients)
    assert "2 of 2 ranks raised" in raised.value.__notes__[0]


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
