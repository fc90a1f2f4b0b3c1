"""Arrays that are needed at every step, made once."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

Made = TypeVar("Made")


class Workspace:
    """Named one-dimensional arrays that grow when they must and are otherwise used again.

    Examples
    --------
    >>> workspace = Workspace()
    >>> first = workspace.array("indices", 8, "uint32")
    >>> second = workspace.array("indices", 4, "uint32")
    >>> second.size, second.base is first.base
    (4, True)
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, np.dtype], NDArray[np.generic]] = {}
        self._objects: dict[Any, Any] = {}

    def made(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return the object that ``make`` returns, made when its key is asked for first."""
        if key not in self._objects:
            self._objects[key] = make()
        made: Made = self._objects[key]
        return made

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return ``size`` elements of ``dtype``, not cleared.

        The array is the caller's until the same name and dtype are asked for again.
        """
        key = (name, np.dtype(dtype))
        array = self._arrays.get(key)
        if array is None or array.size < size:
            array = np.empty(size, dtype)
            self._arrays[key] = array
        return array[:size]
