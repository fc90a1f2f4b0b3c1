"""Arrays that are needed at every step, made once."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpicomp.device import HOST, Device

Made = TypeVar("Made")


class Workspace:
    """Named one-dimensional arrays that grow when they must and are otherwise used again.

    Parameters
    ----------
    device : Device
        Where its arrays are.

    Examples
    --------
    >>> workspace = Workspace()
    >>> first = workspace.array("indices", 8, "uint32")
    >>> second = workspace.array("indices", 4, "uint32")
    >>> second.size, np.shares_memory(first, second)
    (4, True)
    """

    def __init__(self, device: Device = HOST) -> None:
        self.device = device
        self._arrays: dict[tuple[str, np.dtype, bool], Any] = {}
        self._objects: dict[Any, Any] = {}

    def made(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return the object of a key, which ``make`` returns at the first call."""
        if key not in self._objects:
            self._objects[key] = make()
        made: Made = self._objects[key]
        return made

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return ``size`` uninitialised elements on the workspace's device, valid until the next call for the name."""
        array: NDArray[Any] = self._named(name, size, dtype, self.device)
        return array

    def host_array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return such an array in host memory, whatever the device: for counts and other short messages."""
        found: NDArray[Any] = self._named(name, size, dtype, HOST)
        return found

    def _named(self, name: str, size: int, dtype: DTypeLike, device: Device) -> Any:
        key = (name, np.dtype(dtype), device is HOST)
        array = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = device.empty(size, dtype)
        return array if array.size == size else array[:size]
