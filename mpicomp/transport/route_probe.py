"""Measurement of the two routes from a device to MPI, before the first step that uses them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpicomp.places import HOST, Place, RouteTable
from mpicomp.rounds import Round, Rounds
from mpicomp.transport.base import Transport
from mpicomp.transport.routes import ROUTES, at

_SIZES = (1 << 12, 1 << 17, 1 << 22)  # bytes that a rank sends: libraries take other paths for each
_REPEATS = 4  # of which the first one opens connections and registers memory
_NUMBERS = 4099  # float32 whose sums are compared: libraries take other paths for long messages
_SINGLE = np.dtype(np.float32)
_FLAG = np.dtype(np.uint8)
_BYTE = np.dtype(np.uint8)


def choose_routes(places: Sequence[Place], transport: Transport) -> Rounds[None]:
    """Measure both routes and let each place on a device take the faster one for each length. Collective, as rounds.

    Messages and the library's sums apart: some libraries pass on what a GPU holds fast and add it up slowly. Where the
    MPI library of some rank takes no pointers to a device, or no rank has one, nothing is measured, and
    messages are staged. So are sums of floating numbers where the library's sums of device memory differ between ranks.

    Parameters
    ----------
    places : sequence of Place
        Of this rank's buckets; ranks may differ in them.
    transport : Transport
        Of all ranks.
    """
    own = next((place for place in places if place is not HOST), HOST)
    takes = own is HOST or transport.takes_device_memory
    group = transport.group
    flags = np.empty(2 * group.size, _FLAG)
    mine = np.array([own is not HOST, takes], _FLAG)
    flags = (yield Round("allgatherv", [2] * group.size, _FLAG, send=mine, recv=flags)).reshape(-1, 2)
    if group.size == 1 or not flags[:, 0].any() or not flags[:, 1].all():
        return
    seconds, sums = np.empty((2, len(ROUTES), len(_SIZES)))
    for column, nbytes in enumerate(_SIZES):
        seconds[:, column] = yield from _measure(own, transport, _ring(own, transport, nbytes))
        sums[:, column] = yield from _measure(own, transport, _sum(own, nbytes))
    identical = yield from _sums_are_identical(own, transport)
    by_route = [dict(zip(ROUTES, times.tolist(), strict=True)) for times in (seconds, sums)]
    table = RouteTable(_SIZES, by_route[0], identical, by_route[1])
    for place in places:
        if place is not HOST:
            place.routes = table


def _ring(place: Place, transport: Transport, nbytes: int) -> Round:
    """Return a round in which all ranks pass a message to their neighbours."""
    group = transport.group
    peers = ((group.rank + 1) % group.size, (group.rank - 1) % group.size)
    send, recv = place.zeros(nbytes, _BYTE), place.zeros(nbytes, _BYTE)
    return Round("sendrecv", (nbytes, nbytes), _BYTE, send=send, recv=recv, peers=peers)


def _sum(place: Place, nbytes: int) -> Round:
    """Return a round in which the library sums arrays of all ranks."""
    numel = nbytes // _SINGLE.itemsize
    send, recv = place.zeros(numel, _SINGLE), place.zeros(numel, _SINGLE)
    return Round("allreduce", (numel,), _SINGLE, send=send, recv=recv)


def _measure(place: Place, transport: Transport, task: Round) -> Rounds[NDArray[np.float64]]:
    """Return the seconds that a round takes by each route."""
    group, times = transport.group, np.empty((_REPEATS, len(ROUTES), 2))

    def once() -> Rounds[None]:
        yield task

    for repeat in range(_REPEATS):  # one route in turn with the other
        for number, route in enumerate(ROUTES):
            times[repeat, number, 0] = transport.clock()
            yield from at(place, once(), route)
            times[repeat, number, 1] = transport.clock()
    recv_times = np.empty(times.size * group.size)
    task = Round("allgatherv", [times.size] * group.size, times.dtype, send=times.reshape(-1), recv=recv_times)
    everyones = (yield task).reshape(group.size, _REPEATS, len(ROUTES), 2)
    # From the last rank's start to the last rank's end; what disturbs only adds.
    spans: NDArray[np.float64] = everyones[..., 1].max(axis=0) - everyones[..., 0].max(axis=0)
    best: NDArray[np.float64] = np.maximum(spans[1:].min(axis=0), 1e-9)
    return best


def _sums_are_identical(place: Place, transport: Transport) -> Rounds[bool]:
    """Return whether the library's sum of arrays on devices has the same bits on all ranks."""
    group = transport.group
    numbers = np.random.default_rng(group.rank).standard_normal(_NUMBERS).astype(_SINGLE)
    send, recv = place.bring(numbers), place.zeros(_NUMBERS, _SINGLE)

    def add() -> Rounds[None]:
        yield Round("allreduce", (_NUMBERS,), _SINGLE, send=send, recv=recv)

    yield from at(place, add(), "direct")
    mine = place.to_host(recv).view(np.uint8)
    everyones = np.empty(mine.size * group.size, np.uint8)
    task = Round("allgatherv", [mine.size] * group.size, mine.dtype, send=mine, recv=everyones)
    rows = (yield task).reshape(group.size, -1)
    return bool((rows == rows[0]).all())
