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
        self._arrays: dict[tuple[str, Any, bool], Any] = {}
        self._used: set[tuple[str, Any, bool]] = set()  # since the last `release_unused`
        self.last_layout: Any = None
        """Layout of the messages of the last exchange, prepared by the collective that is used again."""
        self._part: tuple[Any, Any] = (None, None)  # an array, and the last part of it that was asked for
        self._objects: dict[Any, Any] = {}

    def made(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return the object of a key, which ``make`` returns at the first call."""
        if key not in self._objects:
            self._objects[key] = make()
        made: Made = self._objects[key]
        return made

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return ``size`` uninitialised elements on the workspace's device, valid until the next call for the name."""
        key = name, dtype, True
        array: NDArray[Any] | None = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = self.device.empty(size, dtype)
        self._used.add(key)
        return array if array.size == size else array[:size]

    def host_array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return such an array in host memory, whatever the device: for counts and other short messages."""
        key = name, dtype, False
        array: NDArray[Any] | None = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = np.empty(size, dtype)
        self._used.add(key)
        return array if array.size == size else array[:size]

    def release_unused(self) -> None:
        """Release arrays that were not asked for since the last call, as those of collectives that were only tried."""
        self._arrays = {key: array for key, array in self._arrays.items() if key in self._used}
        self._used.clear()
        for made in self._objects.values():
            if isinstance(made, Workspace):
                made.release_unused()

    def part(self, array: NDArray[Any], size: int) -> NDArray[Any]:
        """Return the first elements of an array, the same object as in the last call with the same arguments."""
        part: NDArray[Any]
        whole, part = self._part
        if whole is not array or part.size != size:
            part = array[:size]
            self._part = array, part
        return part
