"""Address, layout and stream of arrays on a GPU, by the CUDA array interface or by torch's own methods.

Streams are their addresses; 1 and 2 stand for the legacy default stream and for that of the thread.
"""

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomp.errors import ArrayTypeError

LEGACY = 1
"""The default stream, which waits for all streams but non-blocking ones."""


@dataclass(frozen=True)
class DeviceArray:
    """Address and layout of an array on a GPU."""

    address: int  # of its first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; they may be negative or 0
    dtype: np.dtype[Any]  # uint16 for bfloat16

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        return self.strides == _packed(self.shape, self.dtype.itemsize)

    def span(self) -> tuple[int, int]:
        """Return the start of its memory, in bytes from the first element, and its length in bytes."""
        if not self.size:
            return 0, 0
        ends = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(end for end in ends if end < 0)
        return low, sum(end for end in ends if end > 0) - low + self.dtype.itemsize


def device_array(array: Any) -> DeviceArray | None:
    """Return the address and layout of an array on a GPU; None for arrays of the host and for other objects."""
    if isinstance(array, np.ndarray):
        return None
    if getattr(array, "is_cuda", False):  # torch's array interface knows no bfloat16 and no stream
        dtype = _dtype_of(array.dtype)
        strides = tuple(step * dtype.itemsize for step in array.stride())
        return DeviceArray(array.data_ptr(), tuple(array.shape), strides, dtype)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return None
    # bfloat16 has no type string of its own: two bytes without a meaning.
    typestr = interface["typestr"]
    dtype = np.dtype(np.uint16 if typestr[1:] == "V2" and str(array.dtype) == "bfloat16" else typestr)
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or _packed(shape, dtype.itemsize)
    return DeviceArray(interface["data"][0], shape, strides, dtype)


def _packed(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@functools.cache
def _dtype_of(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def streams_of(arrays: Iterable[Any]) -> set[int]:
    """Return the streams in which arrays on GPUs were made and will be used; none if there is nothing to wait for."""
    streams: set[int] = set()
    devices: set[Any] = set()
    for array in arrays:
        if getattr(array, "is_cuda", False):
            devices.add(array.device)  # torch is asked once a device: it takes longer than all else here
        elif (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
            # Version 2 of the interface names no stream: wait for the legacy one, which waits for most others.
            stream = interface.get("stream", LEGACY)
            if stream == 0:
                raise ArrayTypeError(
                    "device: an array on a GPU must name its stream as None, 1, 2 or an address, got 0, which could be "
                    "either default stream; make its library name one"
                )
            if stream is not None:
                streams.add(stream)
    return streams | {sys.modules["torch"].cuda.current_stream(device).cuda_stream or LEGACY for device in devices}
