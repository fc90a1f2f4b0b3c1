"""Memory that begins or ends at a page which nobody may touch, for whatever a decoder reads or writes.

An access out of bounds then ends the process, where in memory of `malloc` it would hit something else unnoticed.
"""

import ctypes
import itertools
import mmap
import weakref
from collections import defaultdict

import numpy as np

from mpicomp.gpu import Device
from mpicomp.workspace import Workspace

PAGE = mmap.PAGESIZE
MOST = 64 << 20
"""Bytes of one array: messages are of some hundred elements, so code that asks for more believes a count that lies."""

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class TooMuchError(Exception):
    """More memory was asked for than any message is worth."""


class Fence(Device):
    """A place of the host whose arrays lie between two pages without any right, and touch one of them.

    They end at the page behind, as far as their alignment allows, or begin at the one before: the one half of them this
    way and the other half that way.
    """

    def __init__(self):
        self._free = defaultdict(list)
        self._turns = itertools.count()

    def empty(self, size, dtype, at_end=None):
        """Return a new array, filled with bytes that are neither zero nor a number that is likely to be right."""
        dtype = np.dtype(dtype)
        nbytes = int(size) * dtype.itemsize
        if not 0 <= nbytes <= MOST:
            raise TooMuchError(f"{size} elements of {dtype}")
        pages = -(-max(nbytes, 1) // PAGE)
        memory = self._span(pages)
        room = np.frombuffer(memory, np.uint8)
        room[:] = 0xA5
        # Messages are promised to be aligned to 8 bytes.
        alignment = 8 if dtype == np.uint8 else dtype.itemsize
        at_end = next(self._turns) % 2 == 0 if at_end is None else at_end
        start = (room.size - nbytes) // alignment * alignment if at_end else 0
        return room[start : start + nbytes].view(dtype)

    def zeros(self, size, dtype):
        array = self.empty(size, dtype)
        array[:] = 0
        return array

    def _span(self, pages):
        free = self._free[pages]
        if free:
            start = free.pop()
        else:
            mapping = mmap.mmap(-1, (pages + 2) * PAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            _kept.append(mapping)
            for place in (start, start + (pages + 1) * PAGE):
                if _mprotect(place, PAGE, 0):  # PROT_NONE
                    raise OSError(ctypes.get_errno(), "mprotect")
        memory = (ctypes.c_uint8 * (pages * PAGE)).from_address(start + PAGE)
        weakref.finalize(memory, free.append, start)
        return memory


_kept = []  # mappings, which stay as long as the process: their addresses are used again


def fence_workspaces(fence):
    """Have every workspace of this process take its arrays from a fence, each one that it gives out up to the page."""

    def named(self, name, size, dtype, place):
        if not 0 <= int(size) * np.dtype(dtype).itemsize <= MOST:
            raise TooMuchError(f"{size} elements of {np.dtype(dtype)} for {name}")
        key = name, np.dtype(dtype), size
        if key not in self._arrays:
            self._arrays[key] = fence.empty(size, dtype)
        return self._arrays[key]

    Workspace._named = named
