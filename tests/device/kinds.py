"""Where kernels run in tests: on the host, in an emulation of a GPU on the host, and on a GPU where there is one."""

import contextlib
import importlib
import importlib.util
import platform
import shutil
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from device import emulator, fake_cuda
from mpicomp.kernels import cpu, gpu

from mpicomp.compressors import wire as wire_format
from mpicomp.compressors.wire import Wire
from mpicomp.gpu import cuda

GPUS = ["emulated", "cuda"] if importlib.util.find_spec("cupy") else ["emulated"]
"""Without CuPy no test is collected for a GPU; one test says so, in place of every second one."""


def word_of(dtype):
    """Return the unsigned integers that hold the bits of a float."""
    return np.uint32 if dtype == np.float32 else np.uint64


def magnitude_words(array):
    """Return the magnitude bits of an array."""
    return array.view(word_of(array.dtype)) & np.iinfo(word_of(array.dtype)).max // 2


def largest(array, k):
    """Return the ascending indices of the k largest magnitudes, by a stable sort of their bits."""
    return np.sort(np.argsort(-magnitude_words(array).astype(np.int64), kind="stable")[:k])


def check_statistics(place, statistics, total):
    """Compare the statistics of a selection with those of gradient plus residual."""
    assert statistics.finite.item() == np.isfinite(total).all()
    if np.isfinite(total).all():
        with np.errstate(over="ignore"):
            sums = np.abs(place.seen(total)).sum(dtype=np.float64), np.square(place.seen(total), dtype=np.float64).sum()
        np.testing.assert_allclose([statistics.total.item(), statistics.energy.item()], sums, rtol=1e-12)
        assert statistics.nonzero.item() == np.count_nonzero(total)


def with_specials(array):
    """Replace some elements: by NaN, infinity, zeros, and the smallest and largest numbers."""
    info = np.finfo(array.dtype)
    few = [np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, info.tiny, -info.smallest_subnormal, 1e-40, 3e38, info.max]
    places = np.random.default_rng(array.size).choice(array.size, min(array.size, 3 * len(few)), replace=False)
    array[places] = np.array(few * 3)[: places.size].astype(array.dtype)
    return array


def next_bound(workspace, before, listed, wanted, threshold):
    """Return the magnitude bits of the next step's bound, by definition; the workspace keeps the expected gap."""
    gap = getattr(workspace, "expected_gap", 1 - 0.8)
    if before:
        if listed < wanted:
            gap = min(0.5, 4 * gap)
        elif listed > min(2 * wanted, workspace.room):
            gap = max(1e-4, gap / 2)
        elif listed < 1.2 * wanted:
            gap = min(0.5, 1.5 * gap)
    workspace.expected_gap = gap
    with np.errstate(all="ignore"):
        return cpu.magnitude_bits((1 - gap) * threshold, workspace.dtype)


class Outgoing:
    """A cleared message with room for a selection of ``numel`` elements, to be filled by a kernel.

    Its indices are to be plain, coded, or what the kernel finds shorter, by the number of elements.
    """

    def __init__(self, place, room, numel, dtype):
        self.indices, self._numel = ("auto", "plain", "elias-fano")[room % 3], numel
        wire = Wire(indices="plain" if self.indices == "auto" else self.indices)
        self._memory = place.zeros(wire_format.capacity_bytes(room, numel, dtype, wire), np.uint8)
        self.values = self._memory[24 : 24 + room * dtype.itemsize].view(dtype)
        form = wire_format.sparse_lead(0, dtype, Wire(), wire_format.STALE), *wire_format._CODED[self.indices]
        self.form = gpu.Message(self._memory, *form)

    def check(self, total, taken):
        """Compare with the host's message of some elements of an array; the norms may be summed in another order."""
        indices, values = taken.astype(np.uint32), total[taken]
        wire = Wire(indices=wire_format.compact(taken.size, total.size) if self.indices == "auto" else self.indices)
        expected, found = np.zeros(self._memory.size, np.uint8), self._memory.get()
        message = expected[: wire_format.sparse_bytes(taken.size, total.size, total.dtype, wire)]
        with np.errstate(over="ignore", invalid="ignore"):
            energy, finite = float(np.square(total, dtype=np.float64).sum()), np.isfinite(total).all()
            selection = wire_format.Selection(indices, values)
            wire_format.write_sparse(message, selection, total.size, wire, wire_format.STALE, energy, values, finite)
        np.testing.assert_array_equal(found[:8], expected[:8])
        np.testing.assert_array_equal(found[24:], expected[24:])
        if finite:
            norms = (array[8:24].view(np.float64) for array in (found, expected))
            np.testing.assert_allclose(*norms, rtol=1e-12, atol=1e-12 * energy)


def has_gpu():
    """Return whether CuPy is installed and finds a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return False
    cupy = importlib.import_module("cupy")
    try:
        return cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


class Place:
    """Copies arrays to a device and back: to a GPU, or to an emulation whose compiler ``joins`` products and sums."""

    def __init__(self, name, request, monkeypatch, joins=False):
        self.emulated, self.quiet, self.flushing = name != "cuda", contextlib.nullcontext, contextlib.nullcontext
        if not self.emulated:
            if not has_gpu():
                pytest.skip("no GPU, or no CuPy")
            self.cupy = importlib.import_module("cupy")
            monkeypatch.setitem(sys.modules, "cupy", self.cupy)
            return
        request.getfixturevalue("emulated")
        self.cupy = fake_cuda.install(monkeypatch, emulated=True, cupy=fake_cuda.emulating(joins))
        self.quiet, self.flushing = emulator.no_synchronisation, emulator.flushing

    def put(self, array, shift=0):
        """Copy to the device, ``shift`` elements past an aligned address."""
        array = np.ascontiguousarray(array)
        memory = self.cupy.asarray(np.concatenate([np.zeros(shift, array.dtype), array.reshape(-1)]))
        return memory[shift:]

    def seen(self, array):
        """Return an array as kernels read it: on a GPU CuPy has subnormal float32 treated as zero."""
        if self.emulated or array.dtype != np.float32:
            return array
        return np.where(np.abs(array) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), array), array)

    def empty(self, size, dtype, shift=0):
        return self.cupy.empty(size + shift, dtype)[shift:]

    def zeros(self, size, dtype):
        return self.cupy.zeros(size, dtype)

    def scalar(self, value, dtype):
        return self.put(np.array([value], dtype))[0]


@pytest.fixture
def emulated(monkeypatch):
    """Let sources be compiled for the emulation, by tests that make arrays themselves."""
    if shutil.which(emulator.COMPILER) is None:
        pytest.skip(f"no {emulator.COMPILER} to build the emulation with")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulation switches between threads in assembly for x86-64")
    # So that small arrays, too, have more tiles than blocks.
    monkeypatch.setattr("mpicomp.kernels.gpu.compile.LIMIT", 3)


@pytest.fixture(params=GPUS)
def place(request, monkeypatch):
    return Place(request.param, request, monkeypatch)


@pytest.fixture(params=GPUS)
def joining_place(request, monkeypatch):
    """Where products and sums are joined: on a GPU, and in an emulation whose compiler does it as the GPU's."""
    return Place(request.param, request, monkeypatch, joins=True)


class TorchMemory:
    """Stands in for torch and its caching allocator, which keeps segments for each stream, small and large blocks.

    Lengths are torch's own divided by ``shrink``, for tests with short arrays.
    """

    class OutOfMemoryError(RuntimeError):
        pass

    uint8 = "uint8"

    def __init__(self, shrink=1):
        self.cuda = self
        self.room, self._shrink = float("inf"), shrink
        self._free: dict[tuple[int, bool], list[list[int]]] = {}  # of each stream: segment, start, length
        self.segments: list[int] = []
        self.held = self.peak = 0
        self.recorded: list[int] = []

    reserved = property(lambda self: sum(self.segments))

    def empty(self, nbytes, dtype, device):
        assert str(dtype).endswith("uint8")
        assert device.startswith("cuda:")
        if self.held + nbytes > self.room:
            raise self.OutOfMemoryError
        stream, mebibyte = self.current_stream(0).number, max(1, (1 << 20) // self._shrink)
        size = -(-max(1, nbytes) // 512) * 512
        small = size <= mebibyte
        free = self._free.setdefault((stream, small), [])
        fitting = [block for block in free if block[2] >= size]
        if fitting:
            block = min(fitting, key=lambda one: one[2])
            free.remove(block)
        else:
            large = 20 * mebibyte if size < 10 * mebibyte else -(-size // mebibyte) * mebibyte
            length = 2 * mebibyte if small else large
            block = [len(self.segments), 0, length]
            self.segments.append(length)
        segment, start, length = block
        if length - size >= (512 if small else mebibyte):
            free.append([segment, start + size, length - size])
            length = size
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return _Tensor(self, free, [segment, start, length], nbytes)

    def give_back(self, free, block, nbytes):
        self.held -= nbytes
        for other in [other for other in free if other[0] == block[0]]:  # neighbours become one
            if other[1] + other[2] == block[1] or block[1] + block[2] == other[1]:
                free.remove(other)
                block = [block[0], min(block[1], other[1]), block[2] + other[2]]
        free.append(block)

    def current_stream(self, device):
        return SimpleNamespace(number=0, cuda_stream=0)

    def ExternalStream(self, number, device):  # noqa: N802 (torch's name)
        return SimpleNamespace(number=number, wait_stream=lambda other: self.recorded.append(other.cuda_stream))


class _Tensor:
    """Memory of the allocator, until it is gone."""

    def __init__(self, memory, free, block, nbytes):
        self._memory, self._released = memory, weakref.finalize(self, memory.give_back, free, block, nbytes)
        self._released.atexit = False

    def data_ptr(self):
        return 0

    def record_stream(self, stream):
        self._memory.recorded.append(stream.number)


@pytest.fixture
def torch_memory(monkeypatch):
    """Take every array on the device for torch's."""
    made, memory = cuda.cuda_device, TorchMemory()
    monkeypatch.setattr(cuda, "cuda_device", lambda number, of_torch: made(number, True))
    monkeypatch.setitem(sys.modules, "torch", memory)
    return memory
