"""A driver of CUDA without a GPU: streams that take their time, events, and copies by address.

Memory of the device is memory of the host. Work in a stream is done at once (``eager``), when somebody waits for it and
not before (``lazy``), or at some time in between (``random``): code that does not wait, or waits for the wrong stream,
gets rubbish.
"""

import ctypes
import itertools
import random
import threading
import weakref
from collections import deque

import numpy as np

RUBBISH = 0xC9
FROM_HOST, TO_HOST = 1, 2  # kinds of copies, by CUDA's numbers
_numbers = itertools.count(1 << 20)


class Driver:
    """Streams, events, and copies between pinned memory of the host and memory of a device."""

    def __init__(self, schedule="eager", seed=0):
        self.schedule = schedule
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams = {1: deque(), 2: deque()}
        self.events = {}
        self.devices = {}  # of streams and events
        self.contexts = set()  # devices that have one, of which each takes half a gigabyte
        self._thread = threading.local()
        self.on_device = {}  # address: bytes, device
        self.on_host = {}  # address: array
        self.waits = self.allocated = 0
        self.to_host_bytes = self.from_host_bytes = 0

    def place(self, array, device):
        """Let an array be known as memory of a device until it is gone."""
        self.allocated += 1
        if array.nbytes:
            self.on_device[array.ctypes.data] = array.nbytes, device
            weakref.finalize(array, self.on_device.pop, array.ctypes.data, None)

    def device_of(self, address, nbytes=1):
        for start, (size, device) in self.on_device.copy().items():  # collected arrays leave it meanwhile
            if start <= address and address + nbytes <= start + size:
                return device
        raise RuntimeError(f"error 1: {address} is no address of a device")

    def pinned(self, nbytes):
        array = np.full(nbytes, RUBBISH, np.uint8)
        self.on_host[array.ctypes.data] = array  # copies are under way when their arrays are gone
        self.allocated += 1
        return array

    def current(self):
        """Return the device of this thread: 0 in a new one, which has no context yet."""
        return getattr(self._thread, "device", 0)

    def context(self):
        return 1 + self.current() if hasattr(self._thread, "device") else 0

    def use(self, device=None):
        """Make a device current, or the current one if none is named; it has a context from then on."""
        self._thread.device = self.current() if device is None else device
        self.contexts.add(self._thread.device)
        return self._thread.device

    def stream(self):
        number = next(_numbers)
        self.streams[number], self.devices[number] = deque(), self.use()
        return number

    def event(self):
        number = next(_numbers)
        self.events[number], self.devices[number] = None, self.use()
        return number

    def put(self, stream, work):
        with self.lock:
            self.streams[stream].append(work)
            if self.schedule == "eager":
                self.finish(stream)
            elif self.schedule == "random" and self.random.random() < 0.3:
                self.finish(self.random.choice(list(self.streams)))

    def record(self, event, stream):
        marker = object()
        if self.devices[event] != self.devices.get(stream, self.current()):
            raise RuntimeError("cudaErrorInvalidResourceHandle: the event is another device's")
        self.events[event] = stream, marker
        self.put(stream, marker)

    def wait_event(self, stream, event):
        mark = self.events[event]
        self.put(stream, lambda: self._come_to(mark))

    def wait(self, event):
        with self.lock:
            self.waits += 1
            self._come_to(self.events[event])

    def _come_to(self, mark):
        if mark is not None:
            stream, marker = mark
            while marker in self.streams[stream]:
                self._next(self.streams[stream])

    def finish(self, stream):
        with self.lock:
            while self.streams[stream]:
                self._next(self.streams[stream])

    @staticmethod
    def _next(work):
        done = work.popleft()
        if callable(done):
            done()

    def copy(self, to, start, nbytes, kind, stream):
        host, device = (to, start) if kind == TO_HOST else (start, to)
        assert nbytes == 0 or self.device_of(device, nbytes) is not None
        if kind == TO_HOST:
            self.to_host_bytes += nbytes
        else:
            self.from_host_bytes += nbytes
        self._check_pinned(host, nbytes)
        self.put(stream, lambda: ctypes.memmove(to, start, nbytes))

    def _check_pinned(self, host, nbytes):
        spans = [(start, start + array.nbytes) for start, array in self.on_host.items()]
        assert any(start <= host and host + nbytes <= stop for start, stop in spans), "not pinned, or too short"
