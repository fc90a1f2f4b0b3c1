"""Arrays in GPU memory, and the calls of CUDA's driver that copy them.

The library that made such an array has loaded the driver, so neither CuPy nor torch is needed to copy it: it says where
it is, by the CUDA array interface or in torch's own words, and one way of copying serves all. Streams are their
addresses; 1 and 2 stand for the legacy default stream and for that of the thread, in the interface as in the driver.
"""

import contextlib
import ctypes
import functools
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import ArrayTypeError, MpicompError

LEGACY = 1
"""The default stream, which waits for all streams that do not say otherwise."""

_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every device
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_POPPED = ctypes.byref(ctypes.c_void_p())  # a context that is current no longer
_PLAIN_EVENT = 2  # CU_EVENT_DISABLE_TIMING; a thread that sleeps meanwhile would be woken late, for each short message


@dataclass(frozen=True)
class DeviceArray:
    """Address and layout of an array on a GPU."""

    address: int  # of its first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; they may be negative or 0
    dtype: np.dtype[Any]  # bfloat16 comes as uint16

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        return self.strides == _packed(self.shape, self.dtype.itemsize)

    def span(self) -> tuple[int, int]:
        """Return the start of its memory, in bytes from the first element, and its length in bytes."""
        if not self.size:
            return 0, 0
        ends = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(end for end in ends if end < 0)
        return low, sum(end for end in ends if end > 0) - low + self.dtype.itemsize


def device_array(array: Any) -> DeviceArray | None:
    """Return the address and layout of an array on a GPU; None for arrays of the host and for other objects."""
    if isinstance(array, np.ndarray):
        return None
    if getattr(array, "is_cuda", False):
        return _of_torch(array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return None
    # bfloat16 has no type string of its own: two bytes without a meaning.
    typestr = interface["typestr"]
    dtype = np.dtype(np.uint16 if typestr[1:] == "V2" and str(array.dtype) == "bfloat16" else typestr)
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or _packed(shape, dtype.itemsize)
    return DeviceArray(interface["data"][0], shape, strides, dtype)


def _packed(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of elements that lie one after the other."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def streams_of(arrays: Iterable[Any]) -> set[int]:
    """Return the streams in which arrays on GPUs were made and will be used; none if there is nothing to wait for."""
    streams: set[int] = set()
    devices: set[Any] = set()
    for array in arrays:
        if getattr(array, "is_cuda", False):
            devices.add(array.device)  # torch is asked once a device: it takes longer than all else here
        elif (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
            # Before version 3 nothing was said of streams: what the legacy stream waits for is all that can be waited
            # for.
            stream = interface.get("stream", LEGACY)
            if stream == 0:
                raise ArrayTypeError(
                    "device: an array on a GPU must name its stream as None, 1, 2 or an address, got 0, which could be "
                    "either default stream; make its library say which"
                )
            if stream is not None:
                streams.add(stream)
    return streams | {sys.modules["torch"].cuda.current_stream(device).cuda_stream or LEGACY for device in devices}


def _of_torch(tensor: Any) -> DeviceArray:
    # torch's array interface knows no bfloat16 and no stream.
    dtype = _dtype_of(tensor.dtype)
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), strides, dtype)


@functools.cache
def _dtype_of(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def make_current() -> None:
    """Make a context current in this thread if it has none: Intel MPI, which calls CUDA, ends the job without one."""
    for cuda in _in_use:
        cuda.make_current()


class Driver:
    """CUDA's driver through its C interface, in the contexts that CuPy, torch and Numba use.

    Only `wait` waits. Streams and events belong to one device, pinned memory to all of them.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def count(self) -> int:
        """Return the number of devices."""
        devices = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(devices))
        return devices.value

    def memory(self, device: int, nbytes: int) -> int:
        """Return the address of memory on a device, which is never freed."""
        address = ctypes.c_uint64()
        with self._on(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def device_of(self, address: int) -> int:
        """Return the number of the device that an address belongs to."""
        ordinal = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), ctypes.c_int(_ORDINAL), ctypes.c_uint64(address))
        return ordinal.value

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked memory of the host, which is copied to and from without the driver's own staging."""
        host = ctypes.c_void_p()
        with self._on(next(iter(self._contexts), 0)):
            self._call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE))
        assert host.value is not None
        memory = (ctypes.c_uint8 * nbytes).from_address(host.value)
        # Not at the end of the program, which takes the driver's memory with it.
        weakref.finalize(memory, self._library.cuMemFreeHost, host).atexit = False
        return np.ctypeslib.as_array(memory)

    def stream(self, device: int) -> int:
        """Make a stream that does not wait for the default one."""
        made = ctypes.c_void_p()
        with self._on(device):
            self._call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
        assert made.value is not None
        return made.value

    def event(self, device: int) -> int:
        """Make an event."""
        made = ctypes.c_void_p()
        with self._on(device):
            self._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(_PLAIN_EVENT))
        assert made.value is not None
        return made.value

    def record(self, device: int, event: int, stream: int) -> None:
        """Let an event mark the work put into a stream so far."""
        self._call_on(device, "cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_event(self, device: int, stream: int, event: int) -> None:
        """Let work put into a stream from now on come after an event."""
        self._call_on(
            device, "cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0)
        )  # fmt: skip

    def wait(self, device: int, event: int) -> None:
        """Wait until an event has come to pass; at once where it was never recorded."""
        self._call_on(device, "cuEventSynchronize", ctypes.c_void_p(event))

    def fetch(self, device: int, host: int, address: int, nbytes: int, stream: int) -> None:
        """Put a copy from the device to the host into a stream."""
        self._call_on(
            device, "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(host), ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream),
        )  # fmt: skip

    def send(self, device: int, address: int, host: int, nbytes: int, stream: int) -> None:
        """Put a copy from the host to the device into a stream."""
        self._call_on(
            device, "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(address), ctypes.c_void_p(host), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream),
        )  # fmt: skip

    def make_current(self) -> None:
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self._call("cuCtxSetCurrent", next(iter(self._contexts.values())))

    def _call_on(self, device: int, name: str, *arguments: Any) -> None:
        """Call a function where a device's context is current; several times a step, so without `_on`."""
        context = self._contexts.get(device)
        if context is None:
            with self._on(device):
                context = self._contexts[device]
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._call(name, *arguments)
        finally:
            self._library.cuCtxPopCurrent_v2(_POPPED)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Make a device's context current in this thread, which may be one that has none."""
        context = self._contexts.get(device)
        if context is None:
            context, handle = ctypes.c_void_p(), ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
            if self not in _in_use:
                _in_use.append(self)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            said = text.value.decode() if text.value else "no such error"
            raise MpicompError(f"device: {name} failed with error {status} ({said})")


@functools.cache
def driver() -> Driver | None:
    """Return CUDA's driver, None where there is none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, MpicompError):
        return None


_in_use: list[Driver] = []  # the driver, from its first context on
