"""Buckets: several arrays that are exchanged as one, with their residual."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.arrays import ArraySpec
from mpicomp.compressors.base_compressor import Entry
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece, Velocity
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import HOST, Device
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Shape
from mpicomp.workspace import Workspace

_INDEX_LIMIT = 2**32  # indices travel in 32 bits


@dataclass
class Bucket:
    """Arrays of one work dtype, one after the other in a flat array.

    Error feedback keeps two flat arrays and swaps them: one holds the residual, the other receives
    the accumulated gradient. A step that is undone leaves the residual untouched, bit for bit.

    Attributes
    ----------
    feedback : bool
        Whether there is a residual.
    decay : float
        Factor that the residual is multiplied by when it is added to the next gradient.
    """

    index: int
    members: list[ArraySpec]
    feedback: bool
    entry: Entry = field(default_factory=Entry)
    threads: int = 1
    device: Device = HOST
    memory: dict[str, Any] = field(default_factory=dict)
    decay: float = 1.0

    def __post_init__(self) -> None:
        self.workspace = Workspace(self.device)
        self._tables: dict[str, Any] = {}  # see `GradientWithResidual`
        self.names = tuple(member.name for member in self.members)
        self.sizes = sizes = tuple(member.numel for member in self.members)
        self.numel = sum(sizes)
        self.dtype = self.members[0].work_dtype
        self.offsets = [int(offset) for offset in np.concatenate(([0], np.cumsum(sizes)))[:-1]]
        spans = zip(self.names, self.offsets, sizes, strict=True)
        self._spans = {name: slice(offset, offset + size) for name, offset, size in spans}
        if self.numel >= _INDEX_LIMIT:
            raise ConfigurationError(
                f"reduce: '{self.members[0].name}' must have fewer than 2**32 elements, got {self.numel}; split it"
            )
        self._accumulated = self.device.zeros(self.numel + TRAILER, self.dtype)
        self._residual = self.device.zeros(self.numel + TRAILER if self.feedback else 0, self.dtype)
        self._decayed = self.device.zeros(self._residual.size if self.decay != 1 else 0, self.dtype)
        self._velocity = self.device.zeros(self.numel if self.entry.momentum else 0, self.dtype)
        self._next_velocity = self.device.zeros(self._velocity.size, self.dtype)

    @property
    def shape(self) -> Shape:
        """Names, sizes, shapes, dtype and device of the bucket, which policies choose by."""
        return Shape(self.names, self.sizes, tuple(member.shape for member in self.members), self.dtype, self.device)

    def accumulate(self, gradients: Sequence[NDArray[Any]] | None, scale: float = 1.0) -> GradientWithResidual:
        """Return gradient plus residual.

        Parameters
        ----------
        gradients : sequence of arrays or None
            One for each member; None stands for a rank that has none to give (stale).
        scale : float
            Factor that gradients are multiplied by first.
        """
        if gradients is None:
            return GradientWithResidual(self._accumulated, None, [], stale=True)
        pieces = self._pieces(gradients)
        residual = self._residual[: self.numel] if self.feedback else None
        if residual is not None and self.decay != 1:
            with self.device.active():
                residual = np.multiply(residual, self.dtype.type(self.decay), out=self._decayed[: self.numel])
        velocity = None
        if self.entry.momentum:
            velocity = Velocity(self._velocity, self._next_velocity, self.entry.momentum, self.entry.nesterov)
        tables = self._tables
        return GradientWithResidual(self._accumulated, residual, pieces, False, self.threads, scale, velocity, tables)

    def energy(self, gradients: Sequence[NDArray[Any]]) -> float:
        """Return the squared L2 norm of gradients; overwrites where `accumulate` puts its sum."""
        with self.device.active():
            return GradientWithResidual(self._accumulated, None, self._pieces(gradients), threads=self.threads).energy

    def _pieces(self, gradients: Sequence[Any]) -> list[Piece]:
        arrays = (self.device.to_device(array) for array in gradients)
        return [Piece(offset, array) for offset, array in zip(self.offsets, arrays, strict=True)]

    def commit(self, sent: NDArray[np.floating] | Selection, finite: bool) -> None:
        """Make ``accumulated - sent`` the residual; where something was not finite nothing of that is kept."""
        if not self.feedback:
            return
        left = self._accumulated[: self.numel]
        with np.errstate(invalid="ignore", over="ignore"):
            if isinstance(sent, Selection):
                kernels.subtract_at(sent.indices, sent.values, left)
            elif sent.base is left.base:
                left[:] = 0
            else:
                np.subtract(left, sent, out=left)
        if not finite:
            left[~np.isfinite(left)] = 0
        if self.entry.momentum:
            if self.entry.masking and isinstance(sent, Selection):
                kernels.clear_at(sent.indices, self._next_velocity)
            if not finite:
                self._next_velocity[~np.isfinite(self._next_velocity)] = 0
            self._velocity, self._next_velocity = self._next_velocity, self._velocity
        self._accumulated, self._residual = self._residual, self._accumulated

    def memory_on_host(self) -> dict[str, Any]:
        """Return the memory with every array in it copied to the host."""
        copied: dict[str, Any] = _on_host(self.memory, self.device)
        return copied

    def residual(self, name: str) -> NDArray[np.floating]:
        """Return the flat part of the residual that is a member's own, writable."""
        own: NDArray[np.floating] = self._residual[self._spans[name]]
        return own

    def residuals(self) -> Iterator[tuple[ArraySpec, NDArray[np.floating]]]:
        """Return every member with the flat part of the residual that is its own, writable."""
        return self.parts(self._residual)

    def velocities(self) -> Iterator[tuple[ArraySpec, NDArray[np.floating]]]:
        """Return every member with its part of the velocity, writable; nothing where there is no momentum."""
        return self.parts(self._velocity) if self.entry.momentum else iter(())

    def parts(self, flat: NDArray[np.floating]) -> Iterator[tuple[ArraySpec, NDArray[np.floating]]]:
        """Cut a flat array of the bucket into its members'."""
        for member, offset in zip(self.members, self.offsets, strict=True):
            yield member, flat[offset : offset + member.numel]


def cut(members: Sequence[ArraySpec], limit_bytes: int) -> list[list[ArraySpec]]:
    """Cut arrays into groups, in their order; those of one work dtype stay together.

    A group is closed when it has reached the limit, so that small arrays travel with large ones. Arrays without
    elements are in none.
    """
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
    """Cut arrays into buckets, see `cut`. ``device_of`` returns where a bucket of some arrays lives."""
    groups = cut(members, limit_bytes)
    return [
        Bucket(index, group, feedback, entry, threads, device_of(group), decay=decay)
        for index, group in enumerate(groups)
    ]


def _on_host(value: Any, device: Device) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(own, device) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(own, device) for own in value)
    return device.to_host(value) if hasattr(value, "dtype") and hasattr(value, "ndim") else value
