"""Arrays in GPU memory on their way through the host: into an exchange, and the means back.

Everything else works on host arrays. Gradients are copied into pinned memory that is used again at every step, in a
stream of their own that follows the one they were made in: while one bucket travels, those behind it arrive. Means go
back through a few pinned chunks, each filled while the one before it is on its way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import empty_like, from_host, narrow, to_host
from mpicomp.device import MeanPart
from mpicomp.device import driver as device
from mpicomp.device.driver import DeviceArray, Driver

CHUNK = 4 << 20  # bytes of a chunk on the way to the device
CHUNKS = 3  # pinned chunks in use: one is filled, one travels, and one has just arrived


@dataclass
class _Arrival:
    """Pinned memory of one array, and whether it is there."""

    where: int
    memory: NDArray[np.uint8]
    made: int
    here: int
    array: Any = None  # kept as long as it is copied from
    step: int = -1  # the last one in which it was copied
    view: NDArray[Any] | None = None  # it on the host, once it was asked for


class Staging:
    """Copies one reducer's device arrays to the host and the means back, through pinned memory of as many bytes."""

    def __init__(self) -> None:
        self._arrivals: dict[str, _Arrival] = {}
        self._streams: dict[int, int] = {}
        self._chunks: dict[int, _Chunks] = {}
        self._means: dict[str, Any] = {}
        self._step = 0

    def begin(self) -> None:
        """Begin a step: what arrived before is out of date."""
        self._step += 1

    def start(self, name: str, array: Any) -> None:
        """Begin to copy an array to the host, after its stream's work in the calling thread; once a step and name."""
        # Until `host` has come back the array must not change.
        cuda = device.driver()
        if cuda is None or self._arrival(name) is not None:
            return
        found = device.device_array(array)
        if found is None or not found.size:
            return
        low, nbytes = found.span()
        where = cuda.device_of(found.address)
        stream = self._stream(cuda, where)
        arrival = self._arrivals.get(name)
        if arrival is None or arrival.where != where or arrival.memory.size < nbytes:
            if arrival is not None:
                cuda.wait(arrival.where, arrival.here)  # it may still be written to
            arrival = _Arrival(where, cuda.pinned(nbytes), cuda.event(where), cuda.event(where))
            self._arrivals[name] = arrival
        for maker in device.streams_of([array]):
            cuda.record(where, arrival.made, maker)
            cuda.wait_event(where, stream, arrival.made)
        cuda.fetch(where, arrival.memory.ctypes.data, found.address + low, nbytes, stream)
        cuda.record(where, arrival.here, stream)
        arrival.array, arrival.step = array, self._step
        arrival.view = np.ndarray(found.shape, found.dtype, arrival.memory, -low, found.strides)

    def host(self, name: str, array: Any) -> NDArray[Any]:
        """Return an array on the host, when it is there; that of a device is copied once in a step."""
        self.start(name, array)
        arrival = self._arrival(name)
        if arrival is None:
            return to_host(array)
        if arrival.array is not None:
            cuda = device.driver()
            assert cuda is not None
            cuda.wait(arrival.where, arrival.here)
            arrival.array = None
        assert arrival.view is not None
        return arrival.view

    def unflatten(self, mean: NDArray[np.floating], parts: Sequence[MeanPart]) -> list[Any]:
        """Return parts of a flat host mean as the kinds of arrays that came in; on a device the same at every step."""
        return [self._unflatten(part.of(mean), part) for part in parts]

    def _unflatten(self, mean: NDArray[np.floating], to: MeanPart) -> Any:
        cuda, described = device.driver(), to.described
        if cuda is None or device.device_array(to.like) is None:
            return from_host(mean, described, to.like, to.out)
        result = self._means.get(described.name)
        like = to.like
        same = result is not None and (result.shape, result.dtype, result.device) == (
            like.shape,
            like.dtype,
            like.device,
        )
        if not same:
            result = self._means[described.name] = empty_like(like)
        found = device.device_array(result)
        assert found is not None
        if found.size:
            where = cuda.device_of(found.address)
            if where not in self._chunks:
                self._chunks[where] = _Chunks(cuda, where)
            [stream] = device.streams_of([result]) or {device.LEGACY}
            self._chunks[where].send(mean, described.dtype, found, stream)
        return result

    def close(self) -> None:
        """Wait for copies under way, whose memory is released then."""
        cuda = device.driver()
        if cuda is not None:
            for arrival in self._arrivals.values():
                cuda.wait(arrival.where, arrival.here)
            for chunks in self._chunks.values():
                chunks.wait()
        self._arrivals.clear()
        self._chunks.clear()
        self._means.clear()

    def _arrival(self, name: str) -> _Arrival | None:
        """Return the arrival of an array that was copied in this step; None where it was not."""
        arrival = self._arrivals.get(name)
        return arrival if arrival is not None and arrival.step == self._step else None

    def _stream(self, cuda: Driver, where: int) -> int:
        if where not in self._streams:
            self._streams[where] = cuda.stream(where)
        return self._streams[where]


class _Chunks:
    """Pinned chunks of the host that are filled in turn, each when what it held before has arrived."""

    def __init__(self, cuda: Driver, where: int) -> None:
        self._cuda = cuda
        self._where = where
        self._memory = [cuda.pinned(CHUNK) for _ in range(CHUNKS)]
        self._free = [cuda.event(where) for _ in range(CHUNKS)]
        self._next = 0

    def wait(self) -> None:
        """Wait until all of them have arrived."""
        for free in self._free:
            self._cuda.wait(self._where, free)

    def send(self, mean: NDArray[np.floating], dtype: str, to: DeviceArray, stream: int) -> None:
        """Put a flat mean into a contiguous array of the device, in a stream."""
        narrowed = dtype in ("float16", "bfloat16")
        step = CHUNK // to.dtype.itemsize
        for start in range(0, mean.size, step):
            part = mean[start : start + step]
            memory, free = self._memory[self._next], self._free[self._next]
            self._next = (self._next + 1) % CHUNKS
            self._cuda.wait(self._where, free)
            nbytes = part.size * to.dtype.itemsize
            if narrowed:
                narrow(part, dtype, memory[:nbytes].view(np.uint16))
            else:
                np.copyto(memory[:nbytes].view(part.dtype), part)
            address = to.address + start * to.dtype.itemsize
            self._cuda.send(self._where, address, memory.ctypes.data, nbytes, stream)
            self._cuda.record(self._where, free, stream)
