"""The base class of devices, which is the host."""

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpicomp.arrays import ArraySpec

_MAPPED_BYTES = 1 << 20  # from which on memory is the system's again once it is released: malloc may keep it for long


class MeanPart(NamedTuple):
    """The part of a flat mean that belongs to one array, and the conversion to that array's library."""

    start: int
    described: ArraySpec
    like: Any
    out: Any
    """Array of uint16, shape (numel,), for 16-bit results; None for others."""

    def cut(self, mean: Any) -> Any:
        """Return the part."""
        return mean[self.start : self.start + self.described.numel]


@dataclass
class StreamOrder:
    """Order of a bucket's work among the streams of its gradients and means."""

    events: dict[int, Any] = field(default_factory=dict)
    """The last event of each stream that the next exchange has to wait for."""
    readers: set[int] = field(default_factory=set)
    """Streams that may still read the last means."""
    made: Any = None
    """Event after which the last means are there."""


class Device:
    """The device of a bucket's arrays: the host, except in derived classes.

    While an exchange computes, its device is active in the thread (`active`): arrays and kernels are those of the
    device, and so are `to_python` and `received_on_host` of this package.

    Attributes
    ----------
    number : int or None
        Number of the GPU; None for the host.
    """

    number: int | None = None

    def empty(self, size: int, dtype: DTypeLike) -> Any:
        """Return a new array, shape (size,), not cleared."""
        return _mapped(size, dtype) if size * np.dtype(dtype).itemsize >= _MAPPED_BYTES else np.empty(size, dtype)

    def zeros(self, size: int, dtype: DTypeLike) -> Any:
        """Return a new array of zeros, shape (size,)."""
        return _mapped(size, dtype) if size * np.dtype(dtype).itemsize >= _MAPPED_BYTES else np.zeros(size, dtype)

    def active(self, landing: Any = None) -> AbstractContextManager[Any]:
        """Make the device and its stream current in this thread, for an exchange with its pinned memory."""
        return contextlib.nullcontext()

    def to_python(self, *values: Any) -> Sequence[Any]:
        """Return Python numbers for the values that kernels return."""
        return values

    def to_host(self, array: Any) -> NDArray[Any]:
        """Return an array in host memory, complete: a copy of a device's, the same object of the host's."""
        host: NDArray[Any] = array
        return host

    def to_host_all(self, arrays: Sequence[Any]) -> list[NDArray[Any]]:
        """Return arrays of this device in host memory, with one wait."""
        return list(arrays)

    def to_device(self, array: Any) -> Any:
        """Return a constant array on this device: a copy where it is somewhere else."""
        return array

    def assign(self, out: Any, values: NDArray[Any]) -> None:
        """Copy values of the host to an array of this device."""
        out[:] = values

    def mark(self, arrays: Sequence[Any], order: StreamOrder) -> None:
        """Note how far the streams have come that make these arrays: the calling thread's current ones."""

    def wait_for(self, order: StreamOrder) -> None:
        """Let later work of this device wait for all that was marked."""

    def wait(self) -> None:
        """Wait until all work of this device's stream is done."""

    def fetch_head(self, array: Any, nbytes: int, *numbers: Any) -> tuple[NDArray[np.uint8], list[Any]]:
        """Return the first bytes of a device's array, valid until the exchange ends, and numbers, with one wait."""
        raise NotImplementedError("an array on the host needs no copy")

    def unflatten(self, mean: Any, parts: Sequence[MeanPart], order: StreamOrder) -> list[Any]:
        """Return parts of a flat mean of this device as the kinds of arrays that came in."""
        raise NotImplementedError("means on the host are unflattened by mpicomp.arrays.from_host")

    def received_on_host(self, arrays: Sequence[Any]) -> list[NDArray[Any]]:
        """Return short parts of a received array in host memory, with one wait at most."""
        return list(arrays)


def _mapped(size: int, dtype: DTypeLike) -> NDArray[Any]:
    try:
        memory = mmap.mmap(-1, size * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # NumPy's error has the number of bytes
        return np.zeros(size, dtype)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)


HOST: Device = Device()
"""The host."""

_thread = threading.local()


def current_device() -> Device:
    """Return the device that is active in this thread; the host by default."""
    device: Device = getattr(_thread, "device", HOST)
    return device


def current_landing() -> Any:
    """Return the pinned memory of the exchange under way in this thread."""
    return _thread.landing


@contextlib.contextmanager
def activated(device: Device, landing: Any = None) -> Iterator[None]:
    """Let `current_device` and `current_landing` return these in this thread."""
    before = current_device(), getattr(_thread, "landing", None)
    _thread.device, _thread.landing = device, landing
    try:
        yield
    finally:
        _thread.device, _thread.landing = before


def to_python(*values: Any) -> Sequence[Any]:
    """Return Python numbers for the values that kernels return, all of a call in one read of the device."""
    return current_device().to_python(*values)


def received_on_host(array: Any) -> NDArray[Any]:
    """Return a short part of a received array, in host memory; a staged message is there already."""
    return array if type(array) is np.ndarray else current_device().received_on_host([array])[0]
