"""Arrays that are longer than memory: most of their pages are one and the same.

The address space of an array is filled with one small file in memory, mapped over and over, but for windows that have
pages of their own. What is written to one place outside of the windows is then read at many others: a test sees to it
that all of it is zero.
"""

import ctypes
import mmap
import os
import weakref

import numpy as np

FOLD = 16 << 20  # bytes that are mapped again and again: several arrays' fit in a processor's cache
_FIXED, _NORESERVE, _BOTH = 0x10, 0x4000, mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(address, size, flags, descriptor):
    found = _libc.mmap(address, size, _BOTH, flags, descriptor, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return found


def folded(numel, dtype, windows):
    """Return zeros, shape (numel,), with memory of their own only near ``windows``: pairs of first and last element."""
    dtype = np.dtype(dtype)
    nbytes = -(-numel * dtype.itemsize // FOLD) * FOLD
    start = _map(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
    value = {
        block
        for first, last in windows
        for block in range(first * dtype.itemsize // FOLD, last * dtype.itemsize // FOLD + 1)
    }
    descriptor = os.memfd_create("fold")
    os.ftruncate(descriptor, FOLD)
    for block in set(range(nbytes // FOLD)) - value:
        _map(start + block * FOLD, FOLD, mmap.MAP_SHARED | _FIXED, descriptor)
    os.close(descriptor)
    memory = (ctypes.c_char * nbytes).from_address(start)
    weakref.finalize(memory, _libc.munmap, start, nbytes)
    return np.frombuffer(memory, dtype)[:numel]
