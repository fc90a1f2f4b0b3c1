"""Memory of a device that the host may not touch: its pages cannot be read while nobody has a right to them.

All of it is open while a kernel or a copy of the stand-in runs, and the arrays of a round on the direct route from its
post to its completion. Any other code that reads or writes it, in Python or in a library, dies of a segmentation fault.
What this cannot show: an access in the time of another one, by a second thread, or outside the array in its pages.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import Counter, defaultdict

import numpy as np
from device import emulator, fake_cuda

from mpicomp.gpu import routes as gpu_routes

PAGE = mmap.PAGESIZE
_SIZE = 1 << 30  # of the address space alone, until it is written to
_OPEN, _SHUT = mmap.PROT_READ | mmap.PROT_WRITE, 0

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """Pages of one mapping, each array on separate pages."""

    def __init__(self):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._mapping = mmap.mmap(-1, _SIZE, flags)
        self._start = self._end = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self._free = defaultdict(list)  # addresses by length
        self._lent = Counter()  # spans that MPI has
        self._depth = 0
        self._lock = threading.RLock()

    def room(self, nbytes):
        """Return memory, not cleared, that comes back when the last array on it is gone."""
        length = -(-max(nbytes, 1) // PAGE) * PAGE
        with self._lock:
            if self._free[length]:
                address = self._free[length].pop()
            else:
                address, self._end = self._end, self._end + length
                assert self._end <= self._start + _SIZE, "the arena is full"
                self._protect(address, self._end, _OPEN if self._depth else _SHUT)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._free[length].append, address)
        return np.ctypeslib.as_array(memory)

    def holds(self, array):
        """Return whether an array is here."""
        return self._start <= array.ctypes.data < self._end

    @contextlib.contextmanager
    def open(self):
        """Let everything be read and written; may be nested, and used by several threads."""
        with self._lock:
            if self._depth == 0:
                self._protect(self._start, self._end, _OPEN)
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                self._shut()

    def lend(self, array):
        """Open an array's pages until `take_back`."""
        with self._lock:
            self._lent[_span(array)] += 1
            self._protect(*_span(array), _OPEN)

    def take_back(self, array):
        """Shut them again, unless another round has them."""
        with self._lock:
            self._lent[_span(array)] -= 1
            self._lent += Counter()  # without those that nobody has
            self._shut()

    def _shut(self):
        """Shut what nobody uses; what MPI has is not shut for a moment, as it may be at work in another thread."""
        if self._depth:
            return
        start = self._start
        for first, last in sorted(self._lent):
            self._protect(start, first, _SHUT)
            start = max(start, last)
        self._protect(start, self._end, _SHUT)

    @staticmethod
    def _protect(start, end, how):
        if start < end and _mprotect(start, end - start, how):
            raise OSError(ctypes.get_errno(), "mprotect")


def _span(array):
    start, stop = array.data.ptr, array.data.ptr + array.nbytes
    return start // PAGE * PAGE, -(-stop // PAGE) * PAGE


def install(monkeypatch):
    """Guard the memory of `device.fake_cuda` from now on; return the arena."""
    arena = Arena()

    def opening(owner, name, static=False):
        work = getattr(owner, name)

        def opened(*args, **kwargs):
            with arena.open():
                return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, staticmethod(opened) if static else opened)

    opening(fake_cuda.Driver, "_next", static=True)
    for name in ("compute", "read"):
        opening(fake_cuda.Cupy, name)
    opening(fake_cuda.HostKernels, "call")
    for name in ("__init__", "check"):
        opening(emulator.Memory, name)
    monkeypatch.setattr(emulator, "room", arena.room)

    make = fake_cuda.ndarray.__init__

    def move(self, host, base=None, memory=None):
        if host.size and not arena.holds(host):
            memory = emulator.Memory(host.nbytes)
            with arena.open():
                there = memory.inside.view(host.dtype).reshape(host.shape)
                there[...] = host
            host = there
        make(self, host, base, memory)

    monkeypatch.setattr(fake_cuda.ndarray, "__init__", move)

    def arrays(leg):
        both = leg.requested.send, leg.requested.recv
        return [array for array in both if isinstance(array, fake_cuda.ndarray) and array.size]

    begin, finish = gpu_routes.DirectRound.__init__, gpu_routes.DirectRound.finish

    def begun(leg, *args):
        begin(leg, *args)
        for array in arrays(leg):
            arena.lend(array)

    def arrived(leg):
        for array in arrays(leg):
            arena.take_back(array)
        return finish(leg)

    monkeypatch.setattr(gpu_routes.DirectRound, "__init__", begun)
    monkeypatch.setattr(gpu_routes.DirectRound, "finish", arrived)
    return arena
