"""Arrays that are needed at every step, made once: a bucket's own, and scratch that all buckets of a device share."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpicomp.gpu import HOST, Device

Made = TypeVar("Made")

_MAX_VIEWS = 256  # of scratch; of selections every step may have another length


class Scratch:
    """Memory of one exchange at a time: the next exchange, of whatever bucket, writes over it.

    Parameters
    ----------
    device : Device
        Where it is.

    Examples
    --------
    >>> scratch = Scratch()
    >>> message, sums = scratch.array("incoming", 8, "uint8"), scratch.array("incoming", 2, "float32")
    >>> np.shares_memory(message, sums), scratch.nbytes
    (True, 8)
    """

    def __init__(self, device: Device = HOST) -> None:
        self._device = device
        self.slots: dict[str, Any] = {}
        """Bytes by name."""
        self._views: dict[tuple[str, int, Any], Any] = {}
        self._inner: dict[str, Scratch] = {}

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return ``size`` uninitialised elements, which all arrays of this name share, of whatever dtype."""
        view: NDArray[Any] | None = self._views.get((name, size, dtype))
        if view is None:
            nbytes = size * np.dtype(dtype).itemsize
            slot = self.slots.get(name)
            if slot is None or slot.size < nbytes:
                self.slots.pop(name, None)
                self._views = {key: known for key, known in self._views.items() if key[0] != name}
                del slot  # before the longer one is there
                slot = self.slots[name] = self._device.empty(nbytes, np.uint8)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[name, size, dtype] = slot[:nbytes].view(dtype)
        return view

    def inner(self, name: str) -> "Scratch":
        """Return the scratch of an exchange inside this one."""
        return self._inner.setdefault(name, Scratch(self._device))

    def clear(self) -> None:
        """Release everything, between exchanges."""
        self.slots.clear()
        self._views.clear()
        for inner in self._inner.values():
            inner.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        inner = sum(scratch.nbytes for scratch in self._inner.values())
        return inner + sum(int(slot.nbytes) for slot in self.slots.values())


class Workspace:
    """Named one-dimensional arrays of a bucket, which grow when they must and are otherwise used again.

    Parameters
    ----------
    device : Device
        Where its arrays are.
    scratch : Scratch, optional
        Scratch shared with other buckets; one of its own by default.

    Examples
    --------
    >>> workspace = Workspace()
    >>> first = workspace.array("indices", 8, "uint32")
    >>> second = workspace.array("indices", 4, "uint32")
    >>> second.size, np.shares_memory(first, second)
    (4, True)
    """

    def __init__(self, device: Device = HOST, scratch: Scratch | None = None) -> None:
        self.device = device
        self._scratch = Scratch(device) if scratch is None else scratch
        self.scratch = self._scratch.array
        """See `Scratch.array`; the arrays are valid until the exchange ends."""
        self._arrays: dict[tuple[str, Any, bool], Any] = {}
        self.prepared: dict[Any, Any] = {}
        """Objects that a collective has made from these arrays for its next exchange; released with them."""
        self._part: tuple[Any, Any] = (None, None)  # an array, and the last part of it that was asked for
        self._objects: dict[Any, Any] = {}

    def made(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return the object of a key, which ``make`` returns at the first call."""
        if key not in self._objects:
            self._objects[key] = make()
        made: Made = self._objects[key]
        return made

    def inner(self, name: str) -> "Workspace":
        """Return the workspace of an exchange inside the bucket's, which has scratch of its own."""
        return self.made((Workspace, name), lambda: Workspace(self.device, self._scratch.inner(name)))

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return ``size`` uninitialised elements on the workspace's device, valid until the next exchange.

        Arrays that are not needed after the exchange come from `scratch`.
        """
        key = name, dtype, True
        array: NDArray[Any] | None = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = self.device.empty(size, dtype)
        return array if array.size == size else array[:size]

    def host_array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return such an array in host memory, whatever the device: for counts and other short messages."""
        key = name, dtype, False
        array: NDArray[Any] | None = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = np.empty(size, dtype)
        return array if array.size == size else array[:size]

    def clear(self) -> None:
        """Release arrays, between exchanges, as another plan needs others."""
        self._arrays.clear()
        self.prepared, self._part = {}, (None, None)
        for made in self._objects.values():
            if isinstance(made, Workspace):
                made.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, without scratch."""
        inner = sum(made.nbytes for made in self._objects.values() if isinstance(made, Workspace))
        return inner + sum(int(array.nbytes) for array in self._arrays.values())

    def part(self, array: NDArray[Any], size: int) -> NDArray[Any]:
        """Return the first elements of an array, the same object as in the last call with the same arguments."""
        part: NDArray[Any]
        whole, part = self._part
        if whole is not array or part.size != size:
            part = array[:size]
            self._part = array, part
        return part
