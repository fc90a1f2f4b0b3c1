"""Buckets: several arrays that are exchanged as one, with their residual."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.arrays import ArraySpec
from mpicomp.collectives.scheme import Result, Scheme
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Velocity
from mpicomp.compressors.base_compressor import Entry
from mpicomp.compressors.context import Context
from mpicomp.compressors.wire import Selection
from mpicomp.errors import ConfigurationError
from mpicomp.gpu import HOST, Device, StreamOrder, device_array
from mpicomp.policies import Shape
from mpicomp.workspace import Scratch, Workspace

_INDEX_LIMIT = 2**32  # indices travel in 32 bits


class Arrays:
    """Arrays of one work dtype, one after the other in a flat array."""

    def __init__(self, members: Sequence[ArraySpec]) -> None:
        self.names = tuple(member.name for member in members)
        self.sizes = sizes = tuple(member.numel for member in members)
        self.numel = sum(sizes)
        self.dtype = members[0].work_dtype
        self.offsets = list(itertools.accumulate(sizes[:-1], initial=0))
        spans = zip(self.names, self.offsets, sizes, strict=True)
        self._spans = {name: slice(offset, offset + size) for name, offset, size in spans}


@dataclass
class Memory:
    """The flat arrays of a bucket, which live from step to step."""

    sum: Accumulated
    """Receives the next sum."""
    residual: Accumulated | None
    """Its memory holds the residual; None without feedback."""
    velocity: NDArray[np.floating]
    next_velocity: NDArray[np.floating]
    residual_is_zero: bool = True
    """Known to be, so that it need not be added, and its memory not be touched."""


@dataclass
class LastExchange:
    """State of a bucket's last exchange that the next one needs."""

    scheme: Scheme[Any] | None = None
    may_overwrite: bool = False
    """Whether it might overwrite the sum."""
    context: Context | None = None
    means: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)
    """The last means, the specs of their steps, and the arrays that were returned."""


@dataclass
class Bucket(Arrays):
    """Arrays that are exchanged as one.

    Two flat arrays trade places under error feedback: one holds the residual, the other receives the accumulated
    gradient, which becomes the next residual, while a mean is written to the former residual's memory. An undone step
    does not change a bit of the residual. ``decay`` multiplies the residual of a step that counts.

    With ``holds_gradients``, gradients may lie where the sum is made (`gradient`), and the two arrays keep their
    places: the next residual is copied, and a mean is written over the gradients.

    All buckets of a reducer on one device share ``scratch``.
    """

    index: int
    members: list[ArraySpec]
    feedback: bool
    entry: Entry = field(default_factory=Entry)
    threads: int = 1
    device: Device = HOST
    memory: dict[str, Any] = field(default_factory=dict)
    decay: float = 1.0
    holds_gradients: bool = False
    scratch: Scratch | None = None

    def __post_init__(self) -> None:
        super().__init__(self.members)
        if self.numel >= _INDEX_LIMIT:
            raise ConfigurationError(
                f"reduce: '{self.members[0].name}' must have fewer than 2**32 elements, got {self.numel}; split it"
            )
        self.scratch = self.scratch or Scratch(self.device)
        self.workspace = Workspace(self.device, self.scratch)
        self.last = LastExchange()
        self.order = StreamOrder()
        self._sum: Accumulated | None = None  # of the step under way, with the content of its memory
        length, moving = self.numel + TRAILER, self.numel if self.entry.momentum else 0
        self._flat = Memory(
            self._receiver(self.device.zeros(length, self.dtype)),
            self._receiver(self.device.zeros(length, self.dtype)) if self.feedback else None,
            self.device.zeros(moving, self.dtype),
            self.device.zeros(moving, self.dtype),
        )

    def _receiver(self, memory: NDArray[np.floating]) -> Accumulated:
        return Accumulated(memory, None, (), threads=self.threads)

    @functools.cached_property
    def shape(self) -> Shape:
        """Names, sizes, shapes, dtype and device of the bucket, for policies."""
        return Shape(self.names, self.sizes, tuple(member.shape for member in self.members), self.dtype, self.device)

    def accumulate(self, gradients: Sequence[NDArray[Any]] | None, scale: float = 1.0) -> Accumulated:
        """Return gradient plus residual; None for the gradients makes it stale, and ``scale`` multiplies them first."""
        flat = self._flat
        self._sum = accumulated = flat.sum
        if self.device is not HOST:
            self.device.wait_for(self.order)
        if gradients is None:
            if self.holds_gradients:
                self._sum = accumulated = self._receiver(self.device.empty(accumulated.memory.size, self.dtype))
            accumulated.begin(None, (), stale=True)
            return accumulated
        residual = None
        if flat.residual is not None and not flat.residual_is_zero:
            residual = flat.residual.whole
        velocity = None
        if self.entry.momentum:
            velocity = Velocity(flat.velocity, flat.next_velocity, self.entry.momentum, self.entry.nesterov)
        if self.device is HOST:
            pieces = list(zip(self.offsets, gradients, strict=True))
            for place, (offset, array) in enumerate(pieces):
                if np.may_share_memory(array, accumulated.memory) and not self._is_in_place(array, offset):  # a mean
                    pieces[place] = offset, array.copy()
        else:
            pieces = self._pieces_on_device(gradients)
        accumulated.begin(residual, pieces, False, scale, velocity)
        return accumulated

    def _pieces_on_device(self, gradients: Sequence[Any]) -> list[tuple[int, Any]]:
        memory = self._flat.sum.memory
        if self.holds(gradients):
            return [(0, self._flat.sum.whole)]
        pieces = [(offset, self.device.to_device(array)) for offset, array in zip(self.offsets, gradients, strict=True)]
        if not self.holds_gradients:
            return pieces
        with self.device.active():
            shares = np.may_share_memory
            return [
                (offset, array.copy() if shares(array, memory) and not self._is_in_place(array, offset) else array)
                for offset, array in pieces
            ]

    def holds(self, gradients: Sequence[Any]) -> bool:
        """Return whether all gradients of the bucket lie where the sum is made."""
        return self.holds_gradients and all(map(self._is_in_place, gradients, self.offsets))

    def _is_in_place(self, array: Any, offset: int) -> bool:
        memory: Any = self._flat.sum.memory
        if self.device is HOST:
            start, address = (found.__array_interface__["data"][0] for found in (memory, array))
            fits = array.dtype == self.dtype and array.flags.c_contiguous
        else:
            found = device_array(array)
            if found is None:
                return False
            start, address = memory.data.ptr, found.address
            fits = found.dtype == self.dtype and found.is_contiguous
        return self.holds_gradients and fits and address == start + offset * self.dtype.itemsize

    def gradient(self, name: str) -> NDArray[np.floating]:
        """Return the memory in which a member's gradient may lie, flat, writable."""
        return self._flat.sum.memory[self._spans[name]]

    def undo(self) -> None:
        """Subtract the residual from the sum, so that gradients that lie there can be exchanged again."""
        accumulated, self._sum = self._sum, None
        is_here = self.holds_gradients and accumulated is self._flat.sum
        if accumulated is not None and is_here and accumulated.is_computed and accumulated.holds == "sum":
            with self.device.active():
                gradient = accumulated.array()
                if accumulated.residual is not None:
                    gradient -= accumulated.residual
                gradient /= self.dtype.type(accumulated.scale)
            self.device.wait()  # the streams that read gradients have no event to wait for
        if accumulated is not None:
            accumulated.release()

    @property
    def has_lost_gradients(self) -> bool:
        """Whether gradients lay in the bucket and were overwritten, on all ranks."""
        return self.holds_gradients and self._sum is not None and self._sum.holds != "sum"

    def replace_gradients(self, result: Result) -> None:
        """Keep the residual, and let the mean of a step that is repeated stand for the gradients."""
        assert self._sum is not None
        scale = self.dtype.type(self._sum.scale)
        with self.device.active():
            np.divide(self.commit(result, not result.nonfinite), scale, out=self._flat.sum.whole)

    def energy(self, gradients: Sequence[NDArray[Any]]) -> float:
        """Return the squared L2 norm of gradients; overwrites the sum of `accumulate`."""
        if self.device is not HOST:
            self.device.wait_for(self.order)
        pieces = [(offset, self.device.to_device(array)) for offset, array in zip(self.offsets, gradients, strict=True)]
        with self.device.active():
            self._flat.sum.begin(None, pieces)
            return self._flat.sum.energy

    def commit(self, result: Result, finite: bool) -> Any:
        """Make the finite elements of ``accumulated - sent``, decayed, the residual, and return the mean's array."""
        later = self.feedback and finite and result.subtracts and callable(result.mean)
        self.keep(result.sent, finite, later)
        mean, flat = result.mean, self._flat
        if callable(mean):
            write, mean = mean, flat.sum.whole
            if later:
                assert flat.residual is not None
                write(mean, result.sent, flat.residual.whole)
            else:
                write(mean)
        if self.decay != 1 and flat.residual is not None and not flat.residual_is_zero:
            np.multiply(flat.residual.whole, self.dtype.type(self.decay), out=flat.residual.whole)
        return mean

    def keep(self, sent: NDArray[np.floating] | Selection, finite: bool, later: bool = False) -> None:
        """Make the finite elements of ``accumulated - sent`` the residual; see `Result`.

        A selection that is subtracted ``later`` stays in it.
        """
        accumulated, self._sum = self._sum, None
        assert accumulated is not None, "nothing was accumulated"
        accumulated.release()
        flat = self._flat
        left = flat.sum.whole
        if self.feedback and self.entry.momentum:
            self._keep_velocity(sent, finite)
        if flat.residual is None:
            return
        selected = isinstance(sent, Selection)
        if accumulated.holds == "mean" or (accumulated.holds == "sum" and not selected and _is_all_of(left, sent)):
            if not flat.residual_is_zero:
                flat.residual.whole[:] = 0
            flat.residual_is_zero = True
            if accumulated.unsent is not None:
                start, values = accumulated.unsent
                if not finite:
                    values[~np.isfinite(values)] = 0
                flat.residual.memory[start : start + values.size] = values
                flat.residual_is_zero = False
            return
        if isinstance(sent, Selection):
            if not later:
                accumulated.kernels.subtract_at(sent.indices, sent.values, left)
        elif accumulated.holds == "sum":
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(left, sent, out=left)
        if not finite:
            left[~np.isfinite(left)] = 0
        if self.holds_gradients:
            flat.residual.whole[:] = left
        else:
            flat.sum, flat.residual = flat.residual, flat.sum
        flat.residual_is_zero = False

    def skip(self, result: Result) -> Any:
        """Return zeros in place of the mean of a step that is undone."""
        out = self._flat.sum.whole if callable(result.mean) else result.mean
        out[:] = 0
        return out

    def _keep_velocity(self, sent: NDArray[np.floating] | Selection, finite: bool) -> None:
        flat = self._flat
        if self.entry.masking and isinstance(sent, Selection):
            kernels.clear_at(sent.indices, flat.next_velocity)
        if not finite:
            flat.next_velocity[~np.isfinite(flat.next_velocity)] = 0
        flat.velocity, flat.next_velocity = flat.next_velocity, flat.velocity

    def release(self) -> None:
        """Release the arrays of the last exchange, before the next one allocates others."""
        assert self.scratch is not None
        self.workspace.clear()
        self.scratch.clear()

    def settle(self, result: Result) -> None:
        """Subtract a sent array from the sum, or copy it if the sum may not be overwritten: it may lie in scratch."""
        accumulated, sent = self._sum, result.sent
        assert accumulated is not None and not isinstance(sent, Selection)  # noqa: PT018
        if _is_all_of(accumulated.array(), sent):
            return
        if not self.feedback:
            result.sent = accumulated.array()
        elif accumulated.overwrite("residual"):
            left = accumulated.array()
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(left, sent, out=left)
            result.sent = left
        else:
            result.sent = self.workspace.array("kept sent", self.numel, self.dtype)
            result.sent[:] = sent

    def memory_on_host(self) -> dict[str, Any]:
        """Return the memory with every array in it copied to the host."""
        copied: dict[str, Any] = _on_host(self.memory, self.device)
        return copied

    def residual(self, name: str) -> NDArray[np.floating]:
        """Return the flat part of the residual of a member, writable."""
        assert self._flat.residual is not None
        self._flat.residual_is_zero = False
        return self._flat.residual.memory[self._spans[name]]

    def residuals(self) -> Iterator[tuple[ArraySpec, NDArray[np.floating]]]:
        """Return every member with its flat part of the residual, writable."""
        assert self._flat.residual is not None
        self._flat.residual_is_zero = False
        return self.parts(self._flat.residual.memory)

    def velocities(self) -> Iterator[tuple[ArraySpec, NDArray[np.floating]]]:
        """Return every member with its part of the velocity, writable; none without momentum."""
        return self.parts(self._flat.velocity) if self.entry.momentum else iter(())

    def parts(self, flat: NDArray[np.floating]) -> Iterator[tuple[ArraySpec, NDArray[np.floating]]]:
        """Cut a flat array of the bucket into its members'."""
        for member, offset in zip(self.members, self.offsets, strict=True):
            yield member, flat[offset : offset + member.numel]


def _is_all_of(accumulated: NDArray[np.floating], sent: NDArray[np.floating] | Selection) -> bool:
    return not isinstance(sent, Selection) and sent.base is accumulated.base


def cut(members: Sequence[ArraySpec], limit_bytes: int) -> list[list[ArraySpec]]:
    """Cut arrays with elements into groups of one work dtype, in order; a group is closed when it reaches the limit."""
    groups: list[list[ArraySpec]] = []
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        filled = limit_bytes
        for member in members:
            if member.work_dtype != dtype or member.numel == 0:
                continue
            if filled >= limit_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(member)
            filled += member.numel * dtype.itemsize
    return groups


def make_buckets(
    members: Sequence[ArraySpec],
    feedback: bool,
    limit_bytes: int,
    entry: Entry,
    threads: int,
    device_of: Callable[[Sequence[ArraySpec]], Device] = lambda members: HOST,
    decay: float = 1.0,
) -> list[Bucket]:
    """Cut arrays into buckets, see `cut`; ``device_of`` returns the device of a bucket of some arrays."""
    scratches: dict[Device, Scratch] = {}
    buckets = []
    for index, group in enumerate(cut(members, limit_bytes)):
        device = device_of(group)
        scratch = scratches.setdefault(device, Scratch(device))
        buckets.append(Bucket(index, group, feedback, entry, threads, device, decay=decay, scratch=scratch))
    return buckets


def _on_host(value: Any, device: Device) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(item, device) for item in value)
    return device.to_host(value) if hasattr(value, "dtype") and hasattr(value, "ndim") else value
