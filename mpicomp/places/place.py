"""The base class of places, which is the host."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpicomp.arrays import Described
from mpicomp.places.route_table import RouteTable


class MeanPart(NamedTuple):
    """The part of a flat mean that belongs to one array, with what is needed to return it as the kind that came in.

    Attributes
    ----------
    start : int
        Where it begins in the mean.
    described : Described
        Of the array that came in.
    like : array
        That array.
    out : array of uint16, shape (numel,), or None
        Where 16-bit results go; needed for them only.
    """

    start: int
    described: Described
    like: Any
    out: Any

    def of(self, mean: Any) -> Any:
        """Return the part."""
        return mean[self.start : self.start + self.described.numel]


class Place:
    """Where the arrays of a bucket live: the host, unless a class derived from it says otherwise.

    While an exchange computes, its place is current in the thread (`current`): arrays and kernels are those of its
    device, and `numbers` and `received` of this package are those of the place.

    Attributes
    ----------
    device : int or None
        Number of the device; None for the host.
    """

    device: int | None = None
    routes: RouteTable | None = None
    """How its rounds may reach MPI, where that was measured; without it messages are staged."""

    def empty(self, size: int, dtype: DTypeLike) -> Any:
        """Return a new array, shape (size,), not cleared."""
        return np.empty(size, dtype)

    def zeros(self, size: int, dtype: DTypeLike) -> Any:
        """Return a new array of zeros, shape (size,)."""
        return np.zeros(size, dtype)

    def current(self) -> AbstractContextManager[Any]:
        """Make the place, and with it its device and its stream, current in this thread."""
        return contextlib.nullcontext()

    def numbers(self, *values: Any) -> Sequence[Any]:
        """See `mpicomp.places.numbers`."""
        return values

    def to_host(self, array: Any) -> NDArray[Any]:
        """Return an array in host memory, when it is there: a copy of a device's, the same object of the host's."""
        host: NDArray[Any] = array
        return host

    def bring(self, array: Any) -> Any:
        """Return an array that stays as it is at this place: a copy where it is somewhere else."""
        return array

    def assign(self, out: Any, values: NDArray[Any]) -> None:
        """Copy values of the host to an array of this place."""
        out[:] = values

    def follow(self, arrays: Sequence[Any]) -> None:
        """Let what is computed here from now on come after what makes some arrays; nothing waits.

        Called in the thread that made them, whose current stream is meant.
        """

    def wait(self) -> None:
        """Wait until all that was begun here is done; on the host it is."""

    def give(self, mean: Any, parts: Sequence[MeanPart]) -> list[Any]:
        """Return parts of a flat mean of this place as the kinds of arrays that came in."""
        raise NotImplementedError("means on the host are given back by mpicomp.transport.staging")

    def received(self, array: Any) -> NDArray[Any]:
        """See `mpicomp.places.received`."""
        host: NDArray[Any] = array
        return host


HOST = Place()
"""The host."""

_thread = threading.local()


def here() -> Place:
    """Return the place that is current in this thread; the host where nobody has said so."""
    place: Place = getattr(_thread, "place", HOST)
    return place


@contextlib.contextmanager
def entered(place: Place) -> Iterator[None]:
    """Let `here` return a place in this thread."""
    before = here()
    _thread.place = place
    try:
        yield
    finally:
        _thread.place = before


def numbers(*values: Any) -> Sequence[Any]:
    """Return Python numbers for what kernels have returned.

    On a device these are 0-d arrays; all of them are read at once, and the host waits for them. Whoever needs several
    asks for them together.
    """
    return here().numbers(*values)


def picked(array: Any, where: Sequence[int]) -> NDArray[Any]:
    """Return a few elements of an array in host memory, in one read."""
    place = here()
    return place.to_host(array[place.bring(np.array(where, np.int64))])


def received(array: Any) -> NDArray[Any]:
    """Return a short part of what a round has received, in host memory.

    What has come through the host is there already, and nothing is copied.
    """
    return here().received(array)
