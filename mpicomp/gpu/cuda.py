"""A GPU: CuPy's arrays, one stream, pinned memory, and copies that are counted."""

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpicomp.arrays import as_kind_of, narrow, to_host
from mpicomp.gpu.arrays import DeviceArray, device_array, streams_of
from mpicomp.gpu.device import HOST, Device, MeanPart, StreamOrder, activated, current_device, current_landing

_ALIGNMENT = 16  # bytes of parts of pinned memory
_in_use: list[int] = []  # number of the first GPU that a bucket lived on


def common_device(arrays: Sequence[Any]) -> Device:
    """Return the GPU that all arrays of a bucket are on, else the host, to which they are then copied whole."""
    found = [device_array(array) for array in arrays]
    if None in found or not found or not _has_cupy():
        return HOST
    attributes = sys.modules["cupy"].cuda.runtime.pointerGetAttributes
    numbers = {attributes(array.address).device for array in found if array is not None and array.size}
    if len(numbers) != 1:
        return HOST
    return cuda_device(numbers.pop(), all(getattr(array, "is_cuda", False) for array in arrays))


def on_device(arrays: Iterable[Any]) -> bool:
    """Return whether a bucket of some of these arrays would live on a GPU."""
    return any(device_array(array) is not None for array in arrays) and _has_cupy()


def make_current() -> None:
    """Make the GPU in use current in this thread: Intel MPI, which calls CUDA, ends the job where none is."""
    if _in_use:
        sys.modules["cupy"].cuda.runtime.setDevice(_in_use[0])


@functools.cache
def _has_cupy() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount()) and not cupy.cuda.runtime.is_hip
    except RuntimeError:  # CuPy's own errors are RuntimeErrors: no driver
        return False
    except ImportError:
        if getattr(sys.modules.get("torch"), "version", None) is None or sys.modules["torch"].version.hip is None:
            warnings.warn(
                "mpicomp: gradients are on a GPU and CuPy is not installed, so they are copied to the host whole; "
                "pip install 'mpicomp[cuda12]' (or cuda13) has them compressed on the GPU",
                RuntimeWarning,
                stacklevel=2,
            )
        return False


def _allocator_of_torch(cuda: Any, number: int, stream: int) -> Callable[[int], Any]:
    """Return CuPy's way to take memory from torch, whose tools then show it and return it.

    It comes from the pool of torch's current stream, not from one of our stream's, which torch would keep apart.
    """
    torch: Any = sys.modules["torch"]
    ours = torch.cuda.ExternalStream(stream, device=number)

    def allocate(nbytes: int) -> Any:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{number}")
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(f"GPU {number}: torch's allocator has no {nbytes:,} bytes") from error
        if nbytes:
            ours.wait_stream(torch.cuda.current_stream(number))  # whose work may still use it, freed before
            memory.record_stream(ours)  # freed, it is kept until the work here that uses it is done
        return cuda.MemoryPointer(cuda.UnownedMemory(memory.data_ptr(), nbytes, memory, number), 0)

    return allocate


@dataclass(eq=False)
class _Pinned:
    memory: NDArray[np.uint8]
    free: Any
    busy: bool = True


@dataclass
class Landing:
    """Pinned memory in use by one exchange."""

    arrived: list[tuple[Any, _Pinned]] = field(default_factory=list)
    """The arrays that the last round has received, for `received_on_host`."""
    fetched: list[_Pinned] = field(default_factory=list)
    """Memory that `fetch_head` returned, in use until the exchange ends."""


class CudaDevice(Device):
    """One GPU; CuPy has to be loaded. `cuda_device` returns the one that all buckets of a process share.

    All work goes into a stream that no other stream waits for. `mark`, `wait_for` and `unflatten` order it with other
    streams by events; the host waits in `to_python`, `to_host`, `fetch_head` and `received_on_host` only. ``of_torch``
    takes memory from torch's caching allocator, in place of CuPy's.
    """

    def __init__(self, number: int, of_torch: bool = False) -> None:
        self._cupy = sys.modules["cupy"]
        self._cuda = cuda = self._cupy.cuda
        self.number: int = number
        if not _in_use:
            _in_use.append(number)
        with self.current():
            self.stream = cuda.Stream(non_blocking=True)
        # How often the host has waited for numbers, and bytes that were copied.
        self.reads = self.to_host_bytes = self.from_host_bytes = 0
        self._allocator = _allocator_of_torch(cuda, number, self.stream.ptr) if of_torch else None
        self._pinned: list[_Pinned] = []
        self._taking = threading.Lock()  # of pinned memory: a thread that reads a record may meet one that exchanges

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU current in this thread; for good where none was: to return would take memory of GPU 0."""
        runtime = self._cuda.runtime
        before = runtime.getDevice() if self._cuda.driver.ctxGetCurrent() else None
        if before != self.number:
            runtime.setDevice(self.number)
        try:
            yield
        finally:
            if before not in (None, self.number):
                runtime.setDevice(before)

    @contextlib.contextmanager
    def active(self, landing: Any = None) -> Iterator[None]:
        if current_device() is self and landing is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(activated(self, landing))
            stack.enter_context(self.current())
            stack.enter_context(self.stream)
            if self._allocator is not None:
                stack.enter_context(self._cuda.using_allocator(self._allocator))
            yield

    def empty(self, size: int, dtype: DTypeLike) -> Any:
        with self.active():
            return self._cupy.empty(size, dtype)

    def zeros(self, size: int, dtype: DTypeLike) -> Any:
        with self.active():
            return self._cupy.zeros(size, dtype)

    def to_python(self, *values: Any) -> Sequence[Any]:
        places = [place for place, value in enumerate(values) if isinstance(value, self._cupy.ndarray)]
        if not places:
            return values
        self.reads += 1
        numbers = list(values)
        for place, array in zip(places, self.to_host_all([values[place] for place in places]), strict=True):
            numbers[place] = array.item()
        return numbers

    def to_host(self, array: Any) -> NDArray[Any]:
        return array if isinstance(array, np.ndarray) else self.to_host_all([array])[0]

    def to_host_all(self, arrays: Sequence[Any]) -> list[NDArray[Any]]:
        pinned, found = self._fetch(arrays)
        copies = [array.copy() for array in found]
        pinned.busy = False
        return copies

    def _fetch(self, arrays: Sequence[Any]) -> tuple[_Pinned, list[NDArray[Any]]]:
        """Copy arrays of the GPU to pinned memory and wait; return it, which is busy, and its parts."""
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
        pinned = self.pinned(starts[-1])
        for array, start in zip(arrays, starts, strict=False):
            if not array.flags.c_contiguous:
                with self.active():
                    array = array.copy()
            self._copy_to_host(array, pinned, start)
        self.wait()
        memory, places = pinned.memory, zip(arrays, starts, strict=False)
        return pinned, [
            memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape) for array, start in places
        ]

    def to_device(self, array: Any) -> Any:
        if isinstance(array, self._cupy.ndarray) and array.dtype.kind != "V":
            return array
        found = device_array(array)
        if found is not None:
            return self._view(array, found)
        host = np.ascontiguousarray(to_host(array))
        with self.active():
            copy = self._cupy.empty(host.shape, host.dtype)
        self.assign(copy, host)
        return copy

    def fetch_head(self, array: Any, nbytes: int, *numbers: Any) -> tuple[NDArray[np.uint8], list[Any]]:
        pinned, (head, *found) = self._fetch([array[:nbytes], *numbers])
        current_landing().fetched.append(pinned)
        return head, [number.item() for number in found]

    def assign(self, out: Any, values: NDArray[Any]) -> None:
        if not out.size:
            return
        pinned = self.pinned(out.nbytes)
        np.copyto(pinned.memory[: out.nbytes].view(out.dtype).reshape(out.shape), values.view(out.dtype))
        self.send(pinned, 0, out)
        self.release(pinned)

    def received_on_host(self, arrays: Sequence[Any]) -> list[NDArray[Any]]:
        found = [self._landed(array) for array in arrays]
        missing = [array for array, landed in zip(arrays, found, strict=True) if landed is None]
        copies = iter(self.to_host_all(missing) if missing else ())
        return [next(copies) if landed is None else landed for landed in found]

    def _landed(self, array: Any) -> NDArray[Any] | None:
        if isinstance(array, np.ndarray):
            return array
        for received, pinned in current_landing().arrived:
            start = array.data.ptr - received.data.ptr
            if start >= 0 and start + array.nbytes <= received.nbytes:
                part: NDArray[Any] = pinned.memory[start : start + array.nbytes].view(array.dtype)
                return part.reshape(array.shape)
        return None

    def mark(self, arrays: Sequence[Any], order: StreamOrder) -> None:
        streams = streams_of(arrays) | order.readers
        order.readers.clear()
        with self.current():  # whose default streams 1 and 2 stand for
            for stream in streams - {self.stream.ptr}:
                if stream not in order.events:
                    order.events[stream] = self._cuda.Event(disable_timing=True)
                self._cuda.runtime.eventRecord(order.events[stream].ptr, stream)

    def wait_for(self, order: StreamOrder) -> None:
        for event in list(order.events.values()):  # another thread may be marking
            self.stream.wait_event(event)

    def unflatten(self, mean: Any, parts: Sequence[MeanPart], order: StreamOrder) -> list[Any]:
        # Work that is put into the libraries' current streams from now on finds the means there.
        streams = streams_of(part.like for part in parts)
        with self.active():
            for part in parts:
                if part.out is not None:
                    narrow(part.cut(mean), part.described.dtype, part.out)
            if streams:
                order.made = order.made or self._cuda.Event(disable_timing=True)
                order.made.record(self.stream)
                for stream in streams:
                    self._cuda.runtime.streamWaitEvent(stream, order.made.ptr)
        order.readers |= streams
        return list(self._as_kinds_of(mean, parts))

    def wait(self) -> None:
        self.stream.synchronize()

    # For routes: pinned memory, and copies in parts.

    def pinned(self, nbytes: int) -> _Pinned:
        """Return pinned memory of at least ``nbytes``, busy until it is released."""
        with self._taking:
            fitting = [pinned for pinned in self._pinned if not pinned.busy and pinned.memory.size >= nbytes]
            found = min(fitting, key=lambda pinned: pinned.memory.size, default=None)
            if found is None:
                # A power of two, so that lengths that vary from step to step reuse memory.
                from cupyx import empty_pinned

                with self.current():
                    memory = empty_pinned(max(4096, 1 << (nbytes - 1).bit_length()), np.uint8)
                    found = _Pinned(memory, self._cuda.Event(disable_timing=True))
                self._pinned.append(found)
            found.busy = True
        found.free.synchronize()
        return found

    def begin_fetch(self, array: Any) -> _Pinned:
        """Return pinned memory into which an array is being copied; `wait` before it is read."""
        pinned = self.pinned(array.nbytes)
        self._copy_to_host(array, pinned, 0)
        return pinned

    def _copy_to_host(self, array: Any, pinned: _Pinned, start: int) -> None:
        self.to_host_bytes += array.nbytes
        to, kind = pinned.memory.ctypes.data + start, self._cuda.runtime.memcpyDeviceToHost
        self._cuda.runtime.memcpyAsync(to, array.data.ptr, array.nbytes, kind, self.stream.ptr)

    def send(self, pinned: _Pinned, start: int, out: Any) -> None:
        """Begin to copy pinned memory, from a byte on, to a contiguous array."""
        self.from_host_bytes += out.nbytes
        start, kind = pinned.memory.ctypes.data + start, self._cuda.runtime.memcpyHostToDevice
        self._cuda.runtime.memcpyAsync(out.data.ptr, start, out.nbytes, kind, self.stream.ptr)

    def release(self, pinned: _Pinned) -> None:
        """Release pinned memory, to be written to when the copies that were begun have been made."""
        pinned.free.record(self.stream)
        pinned.busy = False

    def _as_kinds_of(self, mean: Any, parts: Sequence[MeanPart]) -> Iterator[Any]:
        wholes: dict[type, Any] = {}  # by library: to hand over each part takes ten times as long as to cut it out
        for part in parts:
            like, found = part.like, device_array(part.like)
            if found is None:
                yield self.to_host(part.cut(mean)).reshape(like.shape)
            elif part.out is not None:
                yield as_kind_of(like, part.out.view(found.dtype).reshape(found.shape))
            else:
                if type(like) not in wholes:
                    wholes[type(like)] = as_kind_of(like, mean)
                yield part.cut(wholes[type(like)]).reshape(found.shape)

    def _view(self, array: Any, found: DeviceArray) -> Any:
        if isinstance(array, self._cupy.ndarray):
            return array.view(found.dtype)  # of bfloat16, which has no kind of its own
        low, nbytes = found.span()
        memory = self._cuda.UnownedMemory(found.address + low, nbytes, array, self.number)
        pointer = self._cuda.MemoryPointer(memory, -low)
        return self._cupy.ndarray(found.shape, found.dtype, pointer, found.strides)


cuda_device = functools.cache(CudaDevice)
"""Return the device of a GPU's number, and whether its memory is torch's, one object for the whole process."""
