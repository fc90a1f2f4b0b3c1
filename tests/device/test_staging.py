"""Gradients of GPU tensors without CuPy: copied to the host whole, by torch, in the thread that passes them."""

import sys
import threading

import numpy as np
import pytest

import mpicomp
from mpicomp import Reducer, TopK
from mpicomp.errors import ArrayTypeError
from mpicomp.gpu import arrays, cuda
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.thread import ProgressThread

torch = pytest.importorskip("torch")


class OnGPU(torch.Tensor):
    """A tensor of the host that takes itself for one of a GPU, which `cpu` alone copies."""

    is_cuda = True
    copying: list[int]  # the thread of each copy

    def cpu(self):
        OnGPU.copying.append(threading.get_ident())
        return self.as_subclass(torch.Tensor).clone()


@pytest.fixture(autouse=True)
def copying(monkeypatch):
    """Have no CuPy, and return the threads of the copies."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda._has_cupy.cache_clear()
    monkeypatch.setattr(OnGPU, "copying", [], raising=False)
    yield OnGPU.copying
    cuda._has_cupy.cache_clear()


def on_gpu(values):
    return torch.from_numpy(np.array(values)).as_subclass(OnGPU)


@pytest.mark.filterwarnings("ignore:mpicomp. gradients are on a GPU")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_same_as_on_the_host_with_one_copy_of_each(copying, dtype):
    rng, shapes = np.random.default_rng(0), {"matrix": (7, 9), "scalar": (), "long": (301,), "empty": (0, 3)}
    worlds = [LocalWorld(2) for _ in range(2)]
    reducers = [[Reducer(TopK(ratio=0.3), comm=end, bucket_bytes=600) for end in world.transports] for world in worlds]
    for _ in range(3):
        gradients = [{name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()} for _ in range(2)]
        staged = [{name: on_gpu(gradient) for name, gradient in mine.items()} for mine in gradients]
        copying.clear()
        expected, means = (
            world.run([reducer.rounds(mine) for reducer, mine in zip(some, inputs, strict=True)])
            for world, some, inputs in zip(worlds, reducers, (gradients, staged), strict=True)
        )
        assert len(copying) == 2 * 3  # none of the empty one
        for ours, theirs, mine, kept in zip(means, expected, staged, gradients, strict=True):
            for name in shapes:
                np.testing.assert_array_equal(ours[name].numpy(), theirs[name])
                np.testing.assert_array_equal(mine[name].as_subclass(torch.Tensor).numpy(), kept[name])


def test_a_warning_names_the_package():
    with pytest.warns(RuntimeWarning, match=r"CuPy is not installed, .* pip install 'mpicomp\[cuda12\]'"):
        mpicomp.allreduce(on_gpu(np.ones(3, np.float32)), "dense", comm=LocalWorld(1).transports[0])


@pytest.mark.filterwarnings("ignore:mpicomp. gradients are on a GPU")
def test_gradients_are_copied_by_the_thread_that_passes_them(copying):
    """Its stream is the one to wait for, and not that of the thread that exchanges."""
    reducer = Reducer("dense", comm=LocalWorld(1).transports[0], bucket_bytes=40)
    gradients = {name: on_gpu(np.full(10, 7, np.float32)) for name in "ab"}
    reducer.reduce(gradients)
    copying.clear()
    with ProgressThread(reducer.transport) as thread:
        stream = reducer.stream(thread)
        for name, gradient in gradients.items():
            stream.put(name, gradient)
        means = stream.finish(gradients)
    assert [means[name].tolist() for name in "ab"] == [[7] * 10] * 2
    assert copying == [threading.get_ident()] * 2
    reducer.close()


# Streams of arrays, by their interface.


@pytest.mark.parametrize(("version", "streams"), [(2, {1}), (3, set())])
def test_arrays_that_name_no_stream(eager, version, streams):
    """Version 2 knows none, so the legacy stream is waited for; with None there is nothing to wait for."""
    array = eager.asarray(np.arange(6, dtype=np.float32))
    eager.version = version
    with eager.stream(None):
        assert arrays.streams_of([array]) == streams


def test_stream_0_is_refused(eager):
    array = eager.asarray(np.ones(3, np.float32))
    expected = r"device: .* must name its stream as None, 1, 2 or an address, got 0"
    with eager.stream(0), pytest.raises(ArrayTypeError, match=expected):
        arrays.streams_of([array])
