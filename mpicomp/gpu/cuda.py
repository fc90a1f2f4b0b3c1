"""A GPU: CuPy's arrays, one stream, and copies that are counted."""

import contextlib
import functools
import struct
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpicomp import kernels
from mpicomp.arrays import as_kind_of, narrow, to_host
from mpicomp.gpu.arrays import DeviceArray, device_array, streams_of
from mpicomp.gpu.device import HOST, Device, MeanPart, activated

_BATCH_NUMBERS = 8  # numbers of 8 bytes that `collect` packs for one read
_FORMATS: dict[type, str] = {
    np.bool_: "?7x", np.int32: "i4x", np.uint32: "I4x", np.float32: "f4x",
    np.int64: "q", np.uint64: "Q", np.float64: "d",
}  # fmt: skip
"""Format of the word of `collect`, by type of number: the lowest bytes of the word are the number's."""
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
    return CudaDevice(numbers.pop(), of_torch=all(getattr(array, "is_cuda", False) for array in arrays))


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


def _allocator_of_torch(cupy: Any, stream: int) -> Any:
    """Return CuPy's way to take memory for a stream from torch, whose tools then show it and return it."""
    memory = sys.modules["torch"].cuda

    def allocate(nbytes: int, number: int) -> int:
        try:
            address: int = memory.caching_allocator_alloc(nbytes, number, stream)
        except memory.OutOfMemoryError as error:
            raise MemoryError(f"GPU {number}: torch's allocator has no {nbytes:,} bytes") from error
        return address

    def free(address: int, number: int) -> None:
        memory.caching_allocator_delete(address)

    return cupy.cuda.PythonFunctionAllocator(allocate, free).malloc


@dataclass(eq=False)
class _Pinned:
    memory: NDArray[np.uint8]
    free: Any
    busy: bool = False


class CudaDevice(Device):
    """One GPU, for one bucket; CuPy has to be loaded.

    All work goes into a stream that no other stream waits for. `wait_stream` and `unflatten` order it with other
    streams by events; the host waits in `to_python`, `to_host` and `received_on_host` only. ``of_torch`` takes memory
    from torch's caching allocator, in place of CuPy's.
    """

    def __init__(self, number: int, of_torch: bool = False) -> None:
        self._cupy = sys.modules["cupy"]
        self._cuda = cuda = self._cupy.cuda
        self.number: int = number
        if not _in_use:
            _in_use.append(number)
        with cuda.Device(number):
            self.stream = cuda.Stream(non_blocking=True)
            # A thread that sleeps until an event would be woken late, for each short message.
            self._mark, self._other_mark = (cuda.Event(disable_timing=True) for _ in range(2))
        # How often the host has waited for numbers, and bytes that were copied.
        self.reads = self.to_host_bytes = self.from_host_bytes = 0
        self._allocator = _allocator_of_torch(self._cupy, self.stream.ptr) if of_torch else None
        self._reading_streams: set[int] = set()  # streams that may still read the last means
        self._pinned: list[_Pinned] = []
        self._head: _Pinned | None = None
        self._landed: list[tuple[int, NDArray[np.uint8], _Pinned]] = []
        # Pinned memory goes back to CuPy's pool with this object: not before the copies are done.
        weakref.finalize(self, self.stream.synchronize).atexit = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(activated(self))
            stack.enter_context(self._cuda.Device(self.number))
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
        on_device = [position for position, value in enumerate(values) if isinstance(value, self._cupy.ndarray)]
        if not on_device:
            return values
        numbers = list(values)
        for start in range(0, len(on_device), _BATCH_NUMBERS):
            batch = on_device[start : start + _BATCH_NUMBERS]
            self.reads += 1
            if len(batch) == 1:
                numbers[batch[0]] = self.to_host(values[batch[0]]).item()
                continue
            with self.active():
                packed = kernels.of(values[batch[0]]).collect([values[position] for position in batch])
            layout = "".join(_FORMATS[values[position].dtype.type] for position in batch)
            for position, number in zip(batch, struct.unpack(f"={layout}", self.to_host(packed).data), strict=True):
                numbers[position] = number
        return numbers

    def to_host(self, array: Any) -> NDArray[Any]:
        if isinstance(array, np.ndarray):
            return array
        host = np.empty(array.shape, array.dtype)
        if not array.flags.c_contiguous:
            with self.active():
                array = array.copy()
        if array.size:
            pinned = self.begin_fetch(array)
            self.wait()
            np.copyto(host, pinned.memory[: array.nbytes].view(array.dtype).reshape(array.shape))
            pinned.busy = False
        return host

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
        if self._head is not None:
            self._head.busy = False
        self._head = head = self.begin_fetch(array[:nbytes])
        fetched = [self.begin_fetch(number) for number in numbers]
        self.wait()
        for pinned in fetched:
            pinned.busy = False
        found = [
            pinned.memory[: number.nbytes].view(number.dtype)[0].item()
            for pinned, number in zip(fetched, numbers, strict=True)
        ]
        return head.memory[:nbytes], found

    def assign(self, out: Any, values: NDArray[Any]) -> None:
        if not out.size:
            return
        pinned = self.pinned(out.nbytes)
        np.copyto(pinned.memory[: out.nbytes].view(out.dtype).reshape(out.shape), values.view(out.dtype))
        self.send(pinned, 0, out)
        self.release(pinned)

    def received_on_host(self, array: Any) -> NDArray[Any]:
        if isinstance(array, np.ndarray):
            return array
        start, nbytes = array.data.ptr, array.nbytes
        for address, host, _ in self._landed:
            if address <= start and start + nbytes <= address + host.nbytes:
                part: NDArray[Any] = host[start - address : start - address + nbytes].view(array.dtype)
                return part.reshape(array.shape)
        return self.to_host(array)

    def wait_stream(self, arrays: Sequence[Any]) -> None:
        streams = streams_of(arrays) | self._reading_streams
        self._reading_streams.clear()
        with self._cuda.Device(self.number):  # whose default streams 1 and 2 stand for
            for stream in streams - {self.stream.ptr}:
                self._cuda.runtime.eventRecord(self._other_mark.ptr, stream)
                self.stream.wait_event(self._other_mark)

    def unflatten(self, mean: Any, parts: Sequence[MeanPart]) -> list[Any]:
        # Work that is put into the libraries' current streams from now on finds the means there.
        with self.active():
            for part in parts:
                if part.out is not None:
                    narrow(part.cut(mean), part.described.dtype, part.out)
        streams = streams_of(part.like for part in parts)
        if streams:
            self._mark.record(self.stream)
            with self._cuda.Device(self.number):
                for stream in streams:
                    self._cuda.runtime.streamWaitEvent(stream, self._mark.ptr)
        self._reading_streams |= streams
        return list(self._as_kinds_of(mean, parts))

    def wait(self) -> None:
        self._mark.record(self.stream)
        self._mark.synchronize()

    # For routes: pinned memory, and copies in parts.

    def begin_fetch(self, array: Any) -> _Pinned:
        """Return pinned memory into which an array is being copied; `wait` before it is read."""
        pinned = self.pinned(array.nbytes)
        self.to_host_bytes += array.nbytes
        self._copy(pinned.memory.ctypes.data, array.data.ptr, array.nbytes, self._cuda.runtime.memcpyDeviceToHost)
        return pinned

    def pinned(self, nbytes: int) -> _Pinned:
        """Return pinned memory of at least ``nbytes``."""
        fitting = [pinned for pinned in self._pinned if not pinned.busy and pinned.memory.size >= nbytes]
        if fitting:
            smallest = min(fitting, key=lambda pinned: pinned.memory.size)
            smallest.free.synchronize()
        else:
            # A power of two, so that lengths that vary from step to step reuse memory.
            from cupyx import empty_pinned

            with self._cuda.Device(self.number):
                memory = empty_pinned(max(4096, 1 << (nbytes - 1).bit_length()), np.uint8)
                smallest = _Pinned(memory, self._cuda.Event(disable_timing=True))
            self._pinned.append(smallest)
        smallest.busy = True
        return smallest

    def send(self, pinned: _Pinned, start: int, out: Any) -> None:
        """Begin to copy pinned memory, from a byte on, to a contiguous array."""
        self.from_host_bytes += out.nbytes
        address = pinned.memory.ctypes.data + start
        self._copy(out.data.ptr, address, out.nbytes, self._cuda.runtime.memcpyHostToDevice)

    def _copy(self, to: int, start: int, nbytes: int, kind: int) -> None:
        self._cuda.runtime.memcpyAsync(to, start, nbytes, kind, self.stream.ptr)

    def keep_received(self, pinned: _Pinned, out: Any) -> None:
        """Keep the pinned memory by which an array was received, for `received_on_host`, until the next round."""
        self._landed.append((out.data.ptr, pinned.memory[: out.nbytes], pinned))

    def release_received(self) -> None:
        """Release the pinned memory of received arrays: another round begins."""
        for *_, pinned in self._landed:
            self.release(pinned)
        self._landed.clear()

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
