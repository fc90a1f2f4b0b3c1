"""Where kernels run in tests: on the host, in an emulation of a GPU on the host, and on a GPU where there is one."""

import contextlib
import functools
import importlib
import importlib.util
import platform
import shutil
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from device import emulator
from mpicomp.kernels import cpu, gpu

from mpicomp.gpu import cuda

GPUS = ["emulated", "cuda"] if importlib.util.find_spec("cupy") else ["emulated"]
"""Without CuPy no test is collected for a GPU; one test says so, in place of every second one."""

_GUARD_BYTES = 64
_RUBBISH = 0xA5


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


class Emulated:
    """An emulation on the host: the code under test has never seen a GPU."""

    cupy = emulator
    emulated = True
    quiet = staticmethod(emulator.no_synchronisation)
    flushing = staticmethod(emulator.flushing)


class Joining(Emulated):
    """The same, compiled as on a GPU: a product and a sum are rounded once wherever the compiler can."""

    cupy = emulator.joining


def has_gpu():
    """Return whether CuPy is installed and finds a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return False
    cupy = importlib.import_module("cupy")
    try:
        return cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


class Cuda:
    """A GPU, with the real CuPy."""

    emulated = False
    quiet = staticmethod(contextlib.nullcontext)
    flushing = staticmethod(contextlib.nullcontext)

    def __init__(self):
        if not has_gpu():
            pytest.skip("no GPU, or no CuPy")
        self.cupy = importlib.import_module("cupy")


class Place:
    """Copies arrays to a device and back."""

    def __init__(self, kind):
        self.cupy, self.emulated, self.quiet, self.flushing = kind.cupy, kind.emulated, kind.quiet, kind.flushing

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


class HostKernels:
    """Kernels of the host, called with arrays between guards, ``shift`` elements past an aligned address."""

    emulated = on_gpu = False
    shift = 0
    flushing = staticmethod(contextlib.nullcontext)

    def __getattr__(self, name):
        found = getattr(cpu, name)
        return functools.partial(self._call, found) if callable(found) and not isinstance(found, type) else found

    def seen(self, array):
        return array

    def _call(self, kernel, *args, **settings):
        arrays = _arrays_in(args)
        memories = {key: np.full(array.nbytes + 4 * _GUARD_BYTES, _RUBBISH, np.uint8) for key, array in arrays.items()}
        copies = {}
        for key, array in arrays.items():
            shift = self.shift * array.itemsize * (array.dtype.kind == "f")
            start = _GUARD_BYTES - memories[key].ctypes.data % _GUARD_BYTES + shift
            copies[key] = memories[key][start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            copies[key][...] = array
        result = kernel(*_replaced(args, copies), **settings)
        for key, array in arrays.items():
            if array.flags.writeable:
                array[...] = copies[key]
            copies[key].reshape(-1).view(np.uint8)[:] = _RUBBISH
            assert (memories[key] == _RUBBISH).all(), f"{kernel.__name__} wrote outside an array"
        return result


class TwinKernels:
    """Kernels of a GPU, called with arrays of the host: copied there and back, and held to the host's kernels.

    A NumPy scalar becomes a number on the device. Nothing that a kernel does may wait for the device. Every array has
    the bits that the host's kernel leaves; exceptions are in `TOLERANCES`.
    """

    on_gpu = True
    shift = 0

    def __init__(self, place):
        self._place, self.emulated, self.flushing, self.seen = place, place.emulated, place.flushing, place.seen

    def __getattr__(self, name):
        found = getattr(gpu, name)
        return functools.partial(self._call, name) if callable(found) and not isinstance(found, type) else found

    def _call(self, name, *args, **settings):
        arrays = _arrays_in(args)
        there = {
            key: self._place.put(array, self.shift * (array.dtype.kind == "f")).reshape(array.shape)
            for key, array in arrays.items()
        }
        host = {key: array.copy() for key, array in arrays.items()}
        given = [self._place.scalar(arg, arg.dtype) if isinstance(arg, np.generic) else arg for arg in args]
        with self._place.quiet():
            result = getattr(gpu, name)(*_replaced(given, there), **settings)
        result = _fetched(result)
        for key, array in arrays.items():
            if array.flags.writeable:
                array[...] = there[key].reshape(-1).get().reshape(array.shape)
        with np.errstate(all="ignore"):
            expected = getattr(cpu, name)(*_replaced(args, host), **settings)
        for key, array in arrays.items():
            if result is not False:  # refused input leaves anything
                self._compare(name, array, host[key])
        _compare_numbers(name, result, expected)
        return result

    def _compare(self, name, array, expected):
        """Same numbers, zeros of the same sign, NaN at the same places."""
        if name in TOLERANCES and (name == "write_header" or array.dtype.kind == "f"):
            if TOLERANCES[name] is not None:
                np.testing.assert_allclose(array, expected, rtol=TOLERANCES[name], atol=1e-5 * (name[0] == "s"))
            return
        if name == "pack_quadratic" and array.dtype == np.uint8:  # scales, of which some may be NaN
            array, expected = array.view(np.float32).view(np.uint32), expected.view(np.float32).view(np.uint32)
            numbers = ~np.isnan(array.view(np.float32)) | ~np.isnan(expected.view(np.float32))
            array, expected = array[numbers], expected[numbers]
        elif array.dtype == np.float32:
            array, expected = self.seen(array), self.seen(expected)
        np.testing.assert_array_equal(array, expected, err_msg=name)
        if array.dtype.kind == "f":
            numbers = ~np.isnan(array)
            np.testing.assert_array_equal(np.signbit(array[numbers]), np.signbit(expected[numbers]), err_msg=name)


TOLERANCES = {"pack_signs": 1.2e-7, "spectrum": None, "write_header": None}
"""Kernels whose sums, in another order, end up in arrays: relative difference, None where the test itself compares."""

NUMBERS = {"tail_statistics": 1e-5, "accumulate": 1e-5}
"""Kernels whose numbers differ by more than 1e-9 between host and GPU, since they sum in another order."""


def _arrays_in(args):
    """Return the arrays among arguments, and in lists among them, by identity."""
    found = {}
    for arg in args:
        if isinstance(arg, np.ndarray):
            found[id(arg)] = arg
        elif isinstance(arg, list | tuple):
            found |= _arrays_in(arg)
    return found


def _replaced(args, arrays):
    return [
        _replaced(arg, arrays) if isinstance(arg, list | tuple) else arrays.get(id(arg), arg) for arg in args
    ]  # fmt: skip


def _fetched(result):
    """Return Python numbers for 0-d arrays of a device."""
    if isinstance(result, tuple | list):
        parts = [_fetched(part) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result.item() if getattr(result, "shape", None) == () else result


def _compare_numbers(name, result, expected):
    if isinstance(expected, tuple | list):
        for number, other in zip(result, expected, strict=True):
            _compare_numbers(name, number, other)
    elif isinstance(expected, float | np.floating):
        if name not in ("logarithms", "share_rounding"):  # sums that nearly cancel; tests compare them
            np.testing.assert_allclose(result, expected, rtol=NUMBERS.get(name, 1e-9), err_msg=name)
    elif isinstance(expected, bool | np.bool_ | int | np.integer):
        assert result == expected, name


@pytest.fixture
def emulated(monkeypatch):
    """Let sources be compiled for the emulation, by tests that make arrays themselves."""
    if shutil.which(emulator.COMPILER) is None:
        pytest.skip(f"no {emulator.COMPILER} to build the emulation with")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulation switches between threads in assembly for x86-64")
    # So that small arrays, too, have more tiles than blocks.
    monkeypatch.setattr("mpicomp.kernels.gpu.compile.LIMIT", 3)


def _place(name, kind, request, monkeypatch):
    if name == "cuda":
        kind = Cuda()
    else:
        request.getfixturevalue("emulated")
    monkeypatch.setitem(sys.modules, "cupy", kind.cupy)
    return Place(kind)


@pytest.fixture(params=GPUS)
def place(request, monkeypatch):
    return _place(request.param, Emulated, request, monkeypatch)


@pytest.fixture(params=GPUS)
def joining_place(request, monkeypatch):
    """Where products and sums are joined: on a GPU, and in an emulation whose compiler does it as the GPU's."""
    return _place(request.param, Joining, request, monkeypatch)


@pytest.fixture
def gpu_kernels(kernels):
    """Those of a GPU alone, for tests of what the host lacks, or that compare it with the host only."""
    return kernels


@pytest.fixture
def kernels(request, monkeypatch):
    """The kernels of a kind of device, called with NumPy arrays; parametrized in tests/kernels/conftest.py."""
    if request.param == "cpu":
        return HostKernels()
    return TwinKernels(_place(request.param, Joining, request, monkeypatch))


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
