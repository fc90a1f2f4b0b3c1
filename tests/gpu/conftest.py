"""Where kernels run: in an emulation on the host, and on a device where there is one."""

import contextlib
import importlib.util
import platform
import shutil
import sys

import numpy as np
import pytest
from gpu import standin

PLACES = ["emulated", "device"] if importlib.util.find_spec("cupy") else ["emulated"]
"""Without CuPy nothing is tried on a device; one test says so, in place of every second one."""


class Emulated:
    """The host stands in for a device: what passes here has never seen one."""

    cupy = standin
    emulated = True
    quiet = staticmethod(standin.no_synchronisation)
    flushing = staticmethod(standin.flushing)


class Joining(Emulated):
    """The same, with a compiler that joins products and sums."""

    cupy = standin.joining


class Device:
    """A real one, with the real CuPy."""

    emulated = False
    quiet = staticmethod(contextlib.nullcontext)
    flushing = staticmethod(contextlib.nullcontext)

    def __init__(self):
        self.cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
        try:
            count = self.cupy.cuda.runtime.getDeviceCount()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"no GPU: {error}")
        if count == 0:
            pytest.skip("no GPU")


class Place:
    """Puts arrays where kernels find them, and gets them back."""

    def __init__(self, kind):
        self.cupy, self.emulated, self.quiet, self.flushing = kind.cupy, kind.emulated, kind.quiet, kind.flushing

    def put(self, array, shift=0):
        """Copy to the device, ``shift`` elements behind an aligned address."""
        array = np.ascontiguousarray(array)
        room = self.cupy.asarray(np.concatenate([np.zeros(shift, array.dtype), array.reshape(-1)]))
        return room[shift:]

    def seen(self, array):
        """Return what kernels make of an array: on a device subnormal float32 are zeros, as CuPy has them treated."""
        if self.emulated or array.dtype != np.float32:
            return array
        return np.where(np.abs(array) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), array), array)

    def empty(self, size, dtype, shift=0):
        return self.cupy.empty(size + shift, dtype)[shift:]

    def zeros(self, size, dtype):
        return self.cupy.zeros(size, dtype)

    def scalar(self, value, dtype):
        return self.put(np.array([value], dtype))[0]


@pytest.fixture(scope="session")
def _built(tmp_path_factory):
    standin.folder = tmp_path_factory.mktemp("emulated")


def _emulate(request, monkeypatch):
    if shutil.which(standin.COMPILER) is None:
        pytest.skip(f"no {standin.COMPILER} to build the emulation with")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulation switches between threads in assembly for x86-64")
    request.getfixturevalue("_built")
    # So that small arrays, too, have more tiles than blocks.
    monkeypatch.setattr("mpicomp.kernels.gpu.compile.LIMIT", 3)


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    if request.param == "device":
        kind = Device()
    else:
        _emulate(request, monkeypatch)
        kind = Emulated
    monkeypatch.setitem(sys.modules, "cupy", kind.cupy)
    return Place(kind)


@pytest.fixture(params=PLACES)
def joining_place(request, monkeypatch):
    """Where products and sums are joined: on a device, and in an emulation whose compiler does it as the device's."""
    if request.param == "device":
        kind = Device()
    else:
        _emulate(request, monkeypatch)
        kind = Joining
    monkeypatch.setitem(sys.modules, "cupy", kind.cupy)
    return Place(kind)


@pytest.fixture
def emulated(request, monkeypatch):
    """Let sources be compiled for the emulation, for whoever brings arrays of its own."""
    _emulate(request, monkeypatch)
