"""A GPU as a place: CuPy's arrays, a stream of its own, and copies that are counted."""

import contextlib
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpicomp import kernels
from mpicomp.arrays import as_kind_of, narrow, to_host
from mpicomp.places import driver as cuda
from mpicomp.places.place import MeanPart, Place, entered

_NUMBERS = 8
"""Numbers that are read at once, of 8 bytes each."""
_FORMATS: dict[type, str] = {
    np.bool_: "?7x", np.int32: "i4x", np.uint32: "I4x", np.float32: "f4x",
    np.int64: "q", np.uint64: "Q", np.float64: "d",
}  # fmt: skip
"""By kind of number, the format of the word that `collect` puts it into: its lowest bytes are the number's."""


class CudaPlace(Place):
    """One GPU, for one bucket; CuPy has to be loaded.

    Everything that is computed goes into a stream that no other one waits for. `follow` and `give` order it with the
    streams of others, by events; the host waits in `numbers`, `to_host` and `received` alone.

    Parameters
    ----------
    device : int
        Number of the device.

    Attributes
    ----------
    stream : int
        Address of its stream.
    reads : int
        How often the host has waited for numbers.
    to_host_bytes, from_host_bytes : int
        Bytes that were copied between the device and the host.
    """

    def __init__(self, device: int) -> None:
        driver = cuda.driver()
        assert driver is not None, "an array on a GPU comes with its driver"
        self._driver = driver
        self._cupy = sys.modules["cupy"]
        self.device: int = device
        self.stream = driver.stream(device)
        self.reads = self.to_host_bytes = self.from_host_bytes = 0
        with self._cupy.cuda.Device(device):
            self._as_cupy = self._cupy.cuda.ExternalStream(self.stream)
        self._mark = driver.event(device)  # of this stream, for others
        self._other = driver.event(device)  # of another stream, for this one
        self._given: set[int] = set()  # streams that may still read the means
        self._pinned: list[_Pinned] = []
        self._landed: list[tuple[int, NDArray[np.uint8], _Pinned]] = []

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See `Place.current`."""
        with entered(self), self._cupy.cuda.Device(self.device), self._as_cupy:
            yield

    def empty(self, size: int, dtype: DTypeLike) -> Any:
        """See `Place.empty`."""
        with self.current():
            return self._cupy.empty(size, dtype)

    def zeros(self, size: int, dtype: DTypeLike) -> Any:
        """See `Place.zeros`."""
        with self.current():
            return self._cupy.zeros(size, dtype)

    def numbers(self, *values: Any) -> Sequence[Any]:
        """See `Place.numbers`; 8 of a device in one read."""
        there = [place for place, value in enumerate(values) if isinstance(value, self._cupy.ndarray)]
        if not there:
            return values
        told = list(values)
        for start in range(0, len(there), _NUMBERS):
            own = there[start : start + _NUMBERS]
            self.reads += 1
            if len(own) == 1:
                told[own[0]] = self.to_host(values[own[0]]).item()
                continue
            with self.current():
                packed = kernels.of(values[own[0]]).collect([values[place] for place in own])
            layout = "".join(_FORMATS[values[place].dtype.type] for place in own)
            for place, number in zip(own, struct.unpack(f"={layout}", self.to_host(packed).data), strict=True):
                told[place] = number
        return told

    def to_host(self, array: Any) -> NDArray[Any]:
        """See `Place.to_host`."""
        if isinstance(array, np.ndarray):
            return array
        host = np.empty(array.shape, array.dtype)
        if not array.flags.c_contiguous:
            with self.current():
                array = array.copy()
        if array.size:
            pinned = self._take(array.nbytes)
            self._fetch(array, pinned)
            self.wait()
            np.copyto(host, pinned.memory[: array.nbytes].view(array.dtype).reshape(array.shape))
            pinned.busy = False
        return host

    def bring(self, array: Any) -> Any:
        """See `Place.bring`."""
        if isinstance(array, self._cupy.ndarray) and array.dtype.kind != "V":
            return array
        found = cuda.device_array(array)
        if found is not None:
            return self._view(array, found)
        host = np.ascontiguousarray(to_host(array))
        with self.current():
            there = self._cupy.empty(host.shape, host.dtype)
        self.assign(there, host)
        return there

    def assign(self, out: Any, values: NDArray[Any]) -> None:
        """Copy values of the host to a contiguous array of the device, in this stream."""
        if not out.size:
            return
        pinned = self._take(out.nbytes)
        np.copyto(pinned.memory[: out.nbytes].view(out.dtype).reshape(out.shape), values.view(out.dtype))
        self.send(pinned, 0, out)
        self.release(pinned)

    def received(self, array: Any) -> NDArray[Any]:
        """See `Place.received`."""
        if isinstance(array, np.ndarray):
            return array
        start, nbytes = array.data.ptr, array.nbytes
        for address, host, _ in self._landed:
            if address <= start and start + nbytes <= address + host.nbytes:
                part: NDArray[Any] = host[start - address : start - address + nbytes].view(array.dtype)
                return part.reshape(array.shape)
        return self.to_host(array)

    def follow(self, arrays: Sequence[Any]) -> None:
        """See `Place.follow`; who was given the last means is waited for as well."""
        streams = cuda.streams_of(arrays) | self._given
        self._given.clear()
        for stream in streams - {self.stream}:
            self._driver.record(self.device, self._other, stream)
            self._driver.follow(self.device, self.stream, self._other)

    def give(self, mean: Any, parts: Sequence[MeanPart]) -> list[Any]:
        """See `Place.give`; what is put into the current streams of their libraries from now on finds them there."""
        with self.current():
            for own in parts:
                if own.out is not None:
                    narrow(own.of(mean), own.described.dtype, own.out)
        streams = cuda.streams_of(own.like for own in parts)
        if streams:
            self._driver.record(self.device, self._mark, self.stream)
        for stream in streams:
            self._driver.follow(self.device, stream, self._mark)
        self._given |= streams
        return list(self._as_kinds_of(mean, parts))

    def wait(self) -> None:
        """Wait until the device has done all that its stream holds."""
        self._driver.record(self.device, self._mark, self.stream)
        self._driver.wait(self.device, self._mark)

    # What routes need: pinned memory, and copies in parts.

    def fetched(self, array: Any) -> "_Pinned":
        """Return pinned memory into which an array is being copied; `wait` before it is read."""
        pinned = self._take(array.nbytes)
        self._fetch(array, pinned)
        return pinned

    def room(self, nbytes: int) -> "_Pinned":
        """Return pinned memory of at least so many bytes."""
        return self._take(nbytes)

    def send(self, pinned: "_Pinned", start: int, out: Any) -> None:
        """Begin to copy pinned memory, from a byte on, to a contiguous array."""
        self.from_host_bytes += out.nbytes
        address = pinned.memory.ctypes.data + start
        self._driver.send(self.device, out.data.ptr, address, out.nbytes, self.stream)

    def land(self, pinned: "_Pinned", out: Any) -> None:
        """Note that an array was received by way of pinned memory, which `received` reads until the next round."""
        self._landed.append((out.data.ptr, pinned.memory[: out.nbytes], pinned))

    def depart(self) -> None:
        """Give back the pinned memory of what has landed: another round begins."""
        for *_, pinned in self._landed:
            self.release(pinned)
        self._landed.clear()

    def release(self, pinned: "_Pinned") -> None:
        """Give pinned memory back, to be written to when the copies that were begun have been made."""
        self._driver.record(self.device, pinned.free, self.stream)
        pinned.busy = False

    def _as_kinds_of(self, mean: Any, parts: Sequence[MeanPart]) -> Iterator[Any]:
        wholes: dict[type, Any] = {}  # by library: to hand over each part takes ten times as long as to cut it out
        for own in parts:
            like, found = own.like, cuda.device_array(own.like)
            if found is None:
                yield self.to_host(own.of(mean)).reshape(like.shape)
            elif own.out is not None:
                yield as_kind_of(like, own.out.view(found.dtype).reshape(found.shape))
            else:
                if type(like) not in wholes:
                    wholes[type(like)] = as_kind_of(like, mean)
                yield own.of(wholes[type(like)]).reshape(found.shape)

    def _fetch(self, array: Any, pinned: "_Pinned") -> None:
        self.to_host_bytes += array.nbytes
        self._driver.fetch(self.device, pinned.memory.ctypes.data, array.data.ptr, array.nbytes, self.stream)

    def _take(self, nbytes: int) -> "_Pinned":
        fitting = [own for own in self._pinned if not own.busy and own.memory.size >= nbytes]
        if fitting:
            pinned = min(fitting, key=lambda own: own.memory.size)
            self._driver.wait(self.device, pinned.free)
        else:
            # A power of two, so that lengths that vary from step to step find room that was made before.
            memory = self._driver.pinned(max(4096, 1 << (nbytes - 1).bit_length()))
            pinned = _Pinned(memory, self._driver.event(self.device))
            self._pinned.append(pinned)
        pinned.busy = True
        return pinned

    def _view(self, array: Any, found: cuda.DeviceArray) -> Any:
        """Return CuPy's array of a piece of memory, which keeps its owner alive."""
        if isinstance(array, self._cupy.ndarray):
            return array.view(found.dtype)  # of bfloat16, which has no kind of its own
        low, nbytes = found.span()
        memory = self._cupy.cuda.UnownedMemory(found.address + low, nbytes, array, self.device)
        pointer = self._cupy.cuda.MemoryPointer(memory, -low)
        return self._cupy.ndarray(found.shape, found.dtype, pointer, found.strides)


class _Pinned:
    """Pinned memory, with the event after which it may be written to."""

    def __init__(self, memory: NDArray[np.uint8], free: int) -> None:
        self.memory = memory
        self.free = free
        self.busy = False
