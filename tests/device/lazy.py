"""A stand-in for CUDA's driver and for CuPy's arrays, as lazy as a device may be.

Memory of the device is memory of the host that only this module reads. What is put into a stream is done when somebody
waits for it and not before, so code that forgets to wait, or puts work into the wrong stream, gets rubbish. It has what
`mpicomp.transport.staging` uses and nothing more.
"""

import contextlib
import itertools
from collections import deque

import numpy as np

RUBBISH = 0xC9
_numbers = itertools.count(1 << 20)


class Driver:
    """Streams, events, and copies between memory of the host that is pinned and that of a device."""

    def __init__(self):
        self.streams = {1: deque(), 2: deque()}
        self.events = {}
        self.on_device = {}  # address: array, device
        self.on_host = {}  # address: array
        self.waits = 0
        self.copied = {"fetch": 0, "send": 0}
        self.allocated = 0

    def place(self, array, where):
        self.on_device[array.ctypes.data] = array, where
        self.allocated += 1

    def _find(self, address):
        for start, (array, where) in self.on_device.items():
            if start <= address < start + max(array.nbytes, 1):
                return array, address - start, where
        raise RuntimeError(f"error 1: {address} is no address of a device")

    def device_of(self, address):
        return self._find(address)[2]

    def pinned(self, nbytes):
        array = np.full(nbytes, RUBBISH, np.uint8)
        self.on_host[array.ctypes.data] = array
        self.allocated += 1
        return array

    def stream(self, device):
        number = next(_numbers)
        self.streams[number] = deque()
        return number

    def event(self, device):
        number = next(_numbers)
        self.events[number] = None
        return number

    def put(self, stream, work):
        self.streams[stream].append(work)

    def record(self, device, event, stream):
        marker = object()
        self.events[event] = stream, marker
        self.put(stream, marker)

    def wait_event(self, device, stream, event):
        mark = self.events[event]
        self.put(stream, lambda: self._come_to(mark))

    def wait(self, device, event):
        self.waits += 1
        self._come_to(self.events[event])

    def _come_to(self, mark):
        if mark is None:
            return
        stream, marker = mark
        work = self.streams[stream]
        while marker in work:
            self._next(work)

    def finish(self, stream):
        work = self.streams[stream]
        while work:
            self._next(work)

    @staticmethod
    def _next(work):
        done = work.popleft()
        if callable(done):
            done()

    def _host(self, address, nbytes):
        for start, array in self.on_host.items():
            if start <= address and address + nbytes <= start + array.nbytes:
                return array[address - start : address - start + nbytes]
        raise RuntimeError("error 1: not pinned, or too short")

    def _bytes(self, address, nbytes):
        array, start, _ = self._find(address)
        whole = np.ndarray(array.nbytes, np.uint8, array.data)
        if start + nbytes > array.nbytes:
            raise RuntimeError("error 1: behind the end of an array")
        return whole[start : start + nbytes]

    def _copy(self, kind, to, source, stream):
        self.copied[kind] += to.size
        self.put(stream, lambda: np.copyto(to, source))

    def fetch(self, device, host, address, nbytes, stream):
        assert self.device_of(address) == device
        self._copy("fetch", self._host(host, nbytes), self._bytes(address, nbytes), stream)

    def send(self, device, address, host, nbytes, stream):
        assert self.device_of(address) == device
        self._copy("send", self._bytes(address, nbytes), self._host(host, nbytes), stream)


class Device:
    """CuPy's: compared by number, and current inside ``with``."""

    def __init__(self, cupy, number):
        self.cupy, self.id = cupy, number

    def __eq__(self, other):
        return self.id == other.id

    def __hash__(self):
        return self.id

    def __enter__(self):
        self.before, self.cupy.current_device = self.cupy.current_device, self.id

    def __exit__(self, *exception):
        self.cupy.current_device = self.before


class Cupy:
    """Of the module: arrays on a device, and a current stream."""

    def __init__(self, driver):
        self.driver = driver
        self.current_stream = 1
        self.current_device = 0
        self.version = 3
        outer = self

        class ndarray:  # noqa: N801 (CuPy's name)
            def __init__(self, memory, where):
                self._memory, self._where = memory, where

            dtype = property(lambda self: self._memory.dtype)
            shape = property(lambda self: self._memory.shape)
            device = property(lambda self: Device(outer, self._where))
            __array__ = None

            def __getitem__(self, key):
                return ndarray(self._memory[key], self._where)

            def transpose(self):
                return ndarray(self._memory.T, self._where)

            @property
            def __cuda_array_interface__(self):
                reported = dict(self._memory.__array_interface__)
                reported["data"] = (self._memory.ctypes.data if self._memory.size else 0, False)
                reported["version"] = outer.version
                if outer.version >= 3:
                    reported["stream"] = outer.current_stream
                return reported

            def get(self):
                outer.driver.finish(outer.current_stream or 1)
                return self._memory.copy()

        ndarray.__module__ = "cupy"
        self.ndarray = ndarray

    def empty(self, shape, dtype):
        memory = np.empty(shape, dtype)
        np.ndarray(memory.nbytes, np.uint8, memory.data)[:] = RUBBISH
        self.driver.place(memory, self.current_device)
        return self.ndarray(memory, self.current_device)

    def compute(self, array, values, stream=None):
        """Let a kernel write values, at some time."""
        values = np.array(values)
        where = self.current_stream if stream is None else stream
        self.driver.put(where, lambda: np.copyto(array._memory, values))

    def made(self, values, stream=None):
        values = np.asarray(values)
        array = self.empty(values.shape, values.dtype)
        self.compute(array, values, stream)
        return array

    @contextlib.contextmanager
    def stream(self, number):
        before, self.current_stream = self.current_stream, number
        try:
            yield
        finally:
            self.current_stream = before
