"""Routes: how the arrays of a round reach MPI from the place where they are.

An exchange asks for rounds on arrays of its place. On the ``staged`` route the message alone goes through pinned memory
of the host, both ways; on the ``direct`` route MPI is given the device's pointers. Transports know neither: what they
are given behaves as an array of the host does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.places import HOST, Place
from mpicomp.rounds import Pending, Returned, Round, Rounds, advance

Value = TypeVar("Value")

ROUTES = ("direct", "staged")


def at(place: Place, exchange: Rounds[Value], route: str | None = None) -> Rounds[Value]:
    """Run an exchange at a place and pass its rounds on, by a route. As rounds.

    The place is current while the exchange computes, and not while its rounds are under way.

    Parameters
    ----------
    place : Place
        Of the exchange's arrays. On the host nothing is changed.
    exchange : generator
        Yields rounds.
    route : {"direct", "staged"}, optional
        Of rounds whose arrays are on a device. None stands for the faster one, see `Place.routes`.
    """
    if place is HOST:
        return (yield from exchange)
    legs: dict[Pending, _Leg] = {}
    reply: Any = None
    while True:
        with place.current():
            asked = advance(exchange, reply)
            if isinstance(asked, Returned):
                return asked.value
            leg = legs.pop(asked) if isinstance(asked, Pending) else _begin(place, asked, route)
        if isinstance(asked, Pending):
            yield asked
            reply = leg.arrive()
        elif asked.background:
            reply = yield leg.task
            legs[reply] = leg
        else:
            yield leg.task
            reply = leg.arrive()


def _begin(place: Any, task: Round, route: str | None) -> "_Leg":
    place.depart()
    if not any(map(_is_there, (task.send, task.recv))):
        return _Leg(task, task)
    return (_Direct if (route or _faster(place, task)) == "direct" else _Staged)(place, task)


def _faster(place: Place, task: Round) -> str:
    """Return the route that was measured to be the faster one for a round; staged where nothing was measured."""
    if place.routes is None:
        return "staged"
    summed = task.operation == "allreduce"
    if summed and task.dtype.kind == "f" and not place.routes.identical_sums:
        return "staged"
    return place.routes.faster(max(own.nbytes for own in (task.send, task.recv) if own is not None), summed)


def _is_there(array: Any) -> bool:
    return array is not None and not isinstance(array, np.ndarray)


class _Leg:
    """A round on its way: what was asked for, and what the transport is given for it."""

    def __init__(self, asked: Round, task: Round) -> None:
        self.asked = asked
        self.task = task

    def arrive(self) -> Any:
        """Return the reply to the exchange, once the round is done."""
        return np.empty(0, self.asked.dtype) if self.asked.recv is None else self.asked.recv


class _Direct(_Leg):
    """A round whose arrays MPI reads and writes where they are."""

    def __init__(self, place: Any, asked: Round) -> None:
        lent: list[Any] = [Lent(place, own) if _is_there(own) else own for own in (asked.send, asked.recv)]
        send, recv = lent
        arrived = None if asked.arrived is None else _within(place, asked.arrived)
        place.wait()  # for what makes the one, and for what still reads the other
        super().__init__(asked, replace(asked, send=send, recv=recv, arrived=arrived))


class _Staged(_Leg):
    """A round whose message goes through pinned memory."""

    def __init__(self, place: Any, asked: Round) -> None:
        self._place = place
        self._parts = False
        send: Any = asked.send
        recv: Any = asked.recv
        arrived = asked.arrived
        self._out = self._in = None
        if _is_there(send):
            self._out = place.fetched(send)
            send = self._out.memory[: send.nbytes].view(asked.dtype)
        if _is_there(recv):
            self._in = place.room(recv.nbytes)
            recv = self._in.memory[: recv.nbytes].view(asked.dtype)
            if arrived is not None:
                arrived = self._part_of(arrived)
        if self._out is not None:
            place.wait()
        super().__init__(asked, replace(asked, send=send, recv=recv, arrived=arrived))

    def _part_of(self, arrived: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return what copies a part to the device as soon as it is there, and hands it on."""
        self._parts = True

        def part(start: int, stop: int) -> None:
            assert self.asked.recv is not None
            with self._place.current():
                self._place.send(self._in, start * self.asked.dtype.itemsize, self.asked.recv[start:stop])
                arrived(start, stop)

        return part

    def arrive(self) -> Any:
        """See `_Leg.arrive`."""
        place, recv = self._place, self.asked.recv
        if self._out is not None:
            self._out.busy = False
        if self._in is not None:
            if not self._parts:
                place.send(self._in, 0, recv)
            place.land(self._in, recv)
        return super().arrive()


class Lent:
    """An array of a device while a transport has it, which MPI takes as a buffer.

    What a transport does with arrays of the host it can do with this one, in any thread: cut it, assign to a part of
    it, copy from it to the host, and hand it to MPI. An assignment is made when it returns, as MPI waits for no stream.

    Parameters
    ----------
    place : CudaPlace
        Where the array is.
    array : cupy.ndarray
        Contiguous; nothing that is still to be done in a stream touches it.
    """

    def __init__(self, place: Any, array: Any) -> None:
        self._place = place
        self._array = array

    @property
    def size(self) -> int:
        """Number of elements."""
        size: int = self._array.size
        return size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told: dict[str, Any] = self._array.__cuda_array_interface__
        return told | {"stream": None}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("an array of a device is copied to the host")
        return np.asarray(self._place.to_host(self._array), dtype)

    def __getitem__(self, part: slice) -> "Lent":
        return Lent(self._place, self._array[part])

    def __setitem__(self, part: slice, values: Any) -> None:
        out, place = self._array[part], self._place
        with place.current():
            if isinstance(values, Lent):
                out[:] = values._array
            else:
                place.assign(out, values)
        place.wait()

    def copy(self) -> NDArray[Any]:
        """Return a copy of it in host memory."""
        return np.asarray(self)


def _within(place: Place, arrived: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def part(start: int, stop: int) -> None:
        with place.current():
            arrived(start, stop)

    return part
