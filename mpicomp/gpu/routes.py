"""Routes by which the arrays of a round reach MPI from a GPU, and which of them is faster.

An exchange asks for rounds on arrays of its device. On the ``staged`` route the message alone goes through pinned
memory of the host, both ways; on the ``direct`` route MPI reads and writes the device's memory. To transports the
arrays behave as arrays of the host do, but collective calls on the device's memory block: Open MPI has no non-blocking
sum of it.

``python -m mpicomp.gpu.routes`` passes MPI a pointer to GPU memory: one rank sends an array of a device to itself, and
sums it. It exits with 0 where the numbers are right, 1 where they are wrong, and `mpicomp.job.cuda_aware.NO_GPU`
without a GPU or CuPy. A library that takes the pointer for one of the host ends the process, so
`mpicomp.job.cuda_aware.probe` starts it as a child.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.gpu.cuda import Landing
from mpicomp.gpu.device import HOST, Device
from mpicomp.job.cuda_aware import NO_GPU
from mpicomp.mpi.rounds import Pending, Returned, Round, Rounds, advance, gather_rows
from mpicomp.mpi.transport import Transport, received

Value = TypeVar("Value")

ROUTES = ("direct", "staged")

_PROBE_BYTES = (1 << 12, 1 << 17, 1 << 22)  # that a rank sends: libraries choose an algorithm by length
_REPEATS = 4  # the first one opens connections and registers memory
_COMPARED_ELEMENTS = 4099  # float32 whose sums are compared
_SELF_TEST_ELEMENTS = 1 << 18
_SINGLE = np.dtype(np.float32)


@dataclass(frozen=True)
class RouteTable:
    """Measured seconds of both routes, the same on all ranks.

    >>> table = RouteTable((1_000, 100_000), {"direct": (4e-6, 8e-5), "staged": (9e-6, 5e-5)})
    >>> table.faster(2_000), table.faster(90_000), table.faster(10**9)
    ('direct', 'staged', 'staged')
    >>> sums = {"direct": (2e-3, 9e-3), "staged": (3e-5, 1e-4)}
    >>> RouteTable(table.sizes, table.seconds, sums).faster(2_000, summed=True)
    'staged'
    """

    sizes: Sequence[int]  # bytes, ascending
    seconds: Mapping[str, Sequence[float]]  # seconds of each size, by route
    # Seconds of a library's sum of as many bytes, which may be slow where messages are fast; ``seconds`` by default.
    sums: Mapping[str, Sequence[float]] | None = None
    identical_sums: bool = True
    """Whether a library's sum of floating numbers on the direct route has the same bits on all ranks."""

    @classmethod
    def always(cls, route: str) -> "RouteTable":
        """Return one that takes a route for every message."""
        return cls((1,), {route: (1.0,)})

    def faster(self, nbytes: int, summed: bool = False) -> str:
        """Return the faster route for ``nbytes``, interpolated between the sizes."""
        position, sizes = np.log(max(1, nbytes)), np.log(self.sizes)
        seconds = self.sums if summed and self.sums is not None else self.seconds
        return min(seconds, key=lambda route: float(np.interp(position, sizes, np.log(seconds[route]))))

    def route_of(self, task: Round) -> str:
        """Return the faster route for a round, from its shape alone: all ranks have to make the same MPI calls."""
        summed = task.operation == "allreduce"
        if summed and task.dtype.kind == "f" and not self.identical_sums:
            return "staged"
        return self.faster(sum(task.counts) * task.dtype.itemsize, summed)


def run_on_device(device: Device, exchange: Rounds[Value], routes: RouteTable | None = None) -> Rounds[Value]:
    """Run an exchange on its device, active while it computes, and pass its rounds on. As rounds.

    Without measured ``routes`` messages are staged.
    """
    if device is HOST:
        return (yield from exchange)
    gpu: Any = device
    landing, pending = Landing(), dict[Pending, _RoutedRound]()
    reply: Any = None
    try:
        while True:
            with gpu.active(landing):
                request = advance(exchange, reply)
                if isinstance(request, Returned):
                    return request.value
                if isinstance(request, Pending):
                    routed = pending.pop(request)
                else:
                    _release(gpu, landing)
                    routed = _routed(gpu, landing, request, routes)
            asked = request if isinstance(request, Pending) else routed.task
            # MPI may call CUDA, which works in the current context.
            with gpu.current() if isinstance(routed, DirectRound) else contextlib.nullcontext():
                reply = yield asked
            if isinstance(asked, Round) and asked.background:
                pending[reply] = routed
            else:
                reply = routed.finish()
    finally:
        _release(gpu, landing)
        for pinned in landing.fetched:
            gpu.release(pinned)


def _release(gpu: Any, landing: Landing) -> None:
    for _, pinned in landing.arrived:
        gpu.release(pinned)
    landing.arrived.clear()


def _routed(gpu: Any, landing: Landing, task: Round, routes: RouteTable | None) -> "_RoutedRound":
    if not task.lends_device_memory:
        return _RoutedRound(task, task)
    if routes is not None and routes.route_of(task) == "direct":
        return DirectRound(gpu, task)
    return StagedRound(gpu, landing, task)


class _RoutedRound:
    def __init__(self, requested: Round, task: Round) -> None:
        self.requested = requested
        self.task = task

    def finish(self) -> Any:
        """Return the reply to the exchange, once the round is done."""
        return received(self.requested)


class DirectRound(_RoutedRound):
    """A round whose arrays MPI reads and writes in the device's memory."""

    def __init__(self, device: Any, requested: Round) -> None:
        buffers: list[Any] = [
            array if array is None or isinstance(array, np.ndarray) else DeviceBuffer(device, array)
            for array in (requested.send, requested.recv)
        ]
        if requested.send is requested.recv:
            buffers[1] = buffers[0]  # summed in place
        arrived = requested.arrived
        if arrived is not None:
            arrived = _when_active(device, arrived)
        device.wait()  # for the work that makes ``send``, and for work that still reads ``recv``
        super().__init__(requested, replace(requested, send=buffers[0], recv=buffers[1], arrived=arrived))


class StagedRound(_RoutedRound):
    """A round whose message goes through pinned memory."""

    def __init__(self, device: Any, landing: Landing, requested: Round) -> None:
        self._device, self._landing = device, landing
        self._copied_in_parts = False
        send: Any = requested.send
        recv: Any = requested.recv
        arrived = requested.arrived
        self._outgoing = self._incoming = None
        if send is not None and not isinstance(send, np.ndarray):
            self._outgoing = device.begin_fetch(send)
            send = self._outgoing.memory[: send.nbytes].view(requested.dtype)
        if recv is not None and not isinstance(recv, np.ndarray):
            self._incoming = device.pinned(recv.nbytes)
            recv = self._incoming.memory[: recv.nbytes].view(requested.dtype)
            if arrived is not None:
                self._copied_in_parts = True
                arrived = _when_active(device, self._copy_then(arrived))
        if self._outgoing is not None:
            device.wait()
        super().__init__(requested, replace(requested, send=send, recv=recv, arrived=arrived))

    def _copy_then(self, arrived: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def copy(start: int, stop: int) -> None:
            assert self.requested.recv is not None
            start_byte = start * self.requested.dtype.itemsize
            self._device.send(self._incoming, start_byte, self.requested.recv[start:stop])
            arrived(start, stop)

        return copy

    def finish(self) -> Any:
        if self._outgoing is not None:
            self._outgoing.busy = False
        if self._incoming is not None:
            if not self._copied_in_parts:
                self._device.send(self._incoming, 0, self.requested.recv)
            self._landing.arrived.append((self.requested.recv, self._incoming))
        return super().finish()


def _when_active(device: Device, arrived: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def part(start: int, stop: int) -> None:
        with device.active():
            arrived(start, stop)

    return part


class DeviceBuffer:
    """An array of a device while a transport has it, for slices, assignments that are complete, copies, and MPI."""

    def __init__(self, device: Any, array: Any) -> None:
        self._device = device
        self._array = array

    @property
    def size(self) -> int:
        """Number of elements."""
        size: int = self._array.size
        return size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._array.__cuda_array_interface__
        return interface | {"stream": None}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("an array of a device is copied to the host")
        return np.asarray(self._device.to_host(self._array), dtype)

    def __getitem__(self, part: slice) -> "DeviceBuffer":
        return DeviceBuffer(self._device, self._array[part])

    def __setitem__(self, part: slice, values: Any) -> None:
        out, device = self._array[part], self._device
        with device.active():
            if isinstance(values, DeviceBuffer):
                out[:] = values._array
            else:
                device.assign(out, values)
        device.wait()

    def copy(self) -> NDArray[Any]:
        """Return a copy of it in host memory."""
        return np.asarray(self)


def choose_routes(devices: Sequence[Device], transport: Transport) -> Rounds[RouteTable | None]:
    """Measure both routes. Collective, as rounds.

    Messages and the library's sums are measured separately: some libraries pass on GPU memory fast and sum it slowly.
    None, so that all messages are staged, where some rank has a bucket on the host, or an MPI library that takes no GPU
    memory: other calls serve GPU memory than the host's, and all ranks have to make the same.
    """
    group, device = transport.group, next(iter(devices), HOST)
    takes = HOST not in devices and device is not HOST and transport.takes_device_memory
    flags = yield from gather_rows(np.uint8(takes), group)
    if group.size == 1 or not flags.all():
        return None
    seconds, sums = np.empty((2, len(ROUTES), len(_PROBE_BYTES)))
    for column, nbytes in enumerate(_PROBE_BYTES):
        numel, peers = nbytes // _SINGLE.itemsize, ((group.rank + 1) % group.size, (group.rank - 1) % group.size)
        send, recv = device.zeros(numel, _SINGLE), device.zeros(numel, _SINGLE)
        ring = Round("sendrecv", (numel, numel), _SINGLE, send=send, recv=recv, peers=peers)
        seconds[:, column] = yield from _measure(device, transport, ring)
        sums[:, column] = yield from _measure(
            device, transport, Round("allreduce", (numel,), _SINGLE, send=send, recv=recv)
        )
    identical = yield from _sums_are_identical(device, transport)
    by_route = [dict(zip(ROUTES, times.tolist(), strict=True)) for times in (seconds, sums)]
    return RouteTable(_PROBE_BYTES, by_route[0], by_route[1], identical)


def _run_once(task: Round) -> Rounds[None]:
    yield task


def _measure(device: Device, transport: Transport, task: Round) -> Rounds[NDArray[np.float64]]:
    group, times = transport.group, np.empty((_REPEATS, len(ROUTES), 2))
    for repeat in range(_REPEATS):  # routes in turn
        for row, route in enumerate(ROUTES):
            times[repeat, row, 0] = transport.clock()
            yield from run_on_device(device, _run_once(task), RouteTable.always(route))
            times[repeat, row, 1] = transport.clock()
    all_times = yield from gather_rows(times, group)
    # From the last rank's start to the last rank's end; disturbances only add.
    spans: NDArray[np.float64] = all_times[..., 1].max(axis=0) - all_times[..., 0].max(axis=0)
    best: NDArray[np.float64] = np.maximum(spans[1:].min(axis=0), 1e-9)
    return best


def _sums_are_identical(device: Device, transport: Transport) -> Rounds[bool]:
    group = transport.group
    numbers = np.random.default_rng(group.rank).standard_normal(_COMPARED_ELEMENTS).astype(_SINGLE)
    send, recv = device.to_device(numbers), device.zeros(_COMPARED_ELEMENTS, _SINGLE)
    task = Round("allreduce", (_COMPARED_ELEMENTS,), _SINGLE, send=send, recv=recv)
    yield from run_on_device(device, _run_once(task), RouteTable.always("direct"))
    rows = yield from gather_rows(device.to_host(recv).view(np.uint8), group)
    return bool((rows == rows[0]).all())


def mpi_takes_pointers(cupy: Any) -> bool:
    """Return whether MPI transfers numbers unchanged through pointers to GPU memory."""
    from mpi4py import MPI  # starts MPI, which only a process with a GPU has to

    values = cupy.arange(_SELF_TEST_ELEMENTS, dtype=np.float32)
    found = -values
    cupy.cuda.get_current_stream().synchronize()
    buffers = [[MPI.memory.fromaddress(array.data.ptr, array.nbytes), MPI.FLOAT] for array in (values, found)]
    MPI.COMM_SELF.Sendrecv(buffers[0], 0, 0, buffers[1], 0, 0)
    if not np.array_equal(found.get(), values.get()):
        return False
    found.fill(-1)
    cupy.cuda.get_current_stream().synchronize()
    MPI.COMM_SELF.Allreduce(buffers[0], buffers[1])
    return np.array_equal(found.get(), values.get())


def _main() -> int:
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except (ImportError, RuntimeError):  # CuPy's own errors are RuntimeErrors
        return NO_GPU
    return 0 if mpi_takes_pointers(cupy) else 1


if __name__ == "__main__":
    sys.exit(_main())
