"""One test of a kernel runs on the host, in an emulation of a GPU, and on a GPU where there is one."""

import contextlib
import functools

import numpy as np
import pytest
from device.kinds import GPUS, Place, emulated, joining_place, place
from mpicomp.kernels import cpu, gpu

__all__ = ["emulated", "joining_place", "place"]


# Families whose float64 is tried in every run, on the host: what selections and their sums are made of.
FLOAT64 = {"accumulate", "message_kernels", "moments", "scatter", "select", "elementwise", "above_threshold"}

HOST_ONLY = {"merge", "products"}  # families without kernels of a GPU, which lists no candidates either


def pytest_generate_tests(metafunc):
    """Run each test on every kind of device; float64 is slow in an emulation, and on the host but for some families."""
    if "kernels" not in metafunc.fixturenames:
        return
    module = metafunc.module.__name__.rpartition("test_")[2]
    hosts_only = module in HOST_ONLY or "candidates" in metafunc.function.__name__
    kinds = ["cpu"] if hosts_only else GPUS if "gpu_kernels" in metafunc.fixturenames else ["cpu", *GPUS]
    if "dtype" not in metafunc.fixturenames:
        metafunc.parametrize("kernels", kinds, indirect=True)
        return
    fast = {"cpu", "cuda"} if module in FLOAT64 else {"cuda"}
    cases = [
        pytest.param(kind, dtype, marks=[] if dtype == np.float32 or kind in fast else [pytest.mark.slow])
        for kind in kinds
        for dtype in (np.float32, np.float64)
    ]
    metafunc.parametrize(("kernels", "dtype"), cases, indirect=["kernels"])


_GUARD_BYTES = 64
_RUBBISH = 0xA5


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
def gpu_kernels(kernels):
    """Those of a GPU alone, for tests of what the host lacks, or that compare it with the host only."""
    return kernels


@pytest.fixture
def kernels(request, monkeypatch):
    """The kernels of a kind of device, called with NumPy arrays."""
    if request.param == "cpu":
        return HostKernels()
    return TwinKernels(Place(request.param, request, monkeypatch, joins=True))
