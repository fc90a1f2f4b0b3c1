"""Buckets: several arrays that are exchanged as one, with their residual."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import Described
from mpicomp.compressors.accumulated import TAIL, Accumulated, Piece, Velocity
from mpicomp.compressors.base import Entry
from mpicomp.compressors.kinds import Selection
from mpicomp.errors import ConfigurationError
from mpicomp.kernels import cpu
from mpicomp.policies import Shape
from mpicomp.workspace import Workspace

_INDEX_LIMIT = 2**32  # indices travel in 32 bits


@dataclass
class Bucket:
    """Arrays of one work dtype, one after the other in a flat array.

    Error feedback keeps two flat arrays and swaps them: one holds the residual, the other receives
    the accumulated gradient. A step that is undone leaves the residual untouched, bit for bit.
    """

    index: int
    members: list[Described]
    feedback: bool
    entry: Entry = field(default_factory=Entry)
    threads: int = 1
    workspace: Workspace = field(default_factory=Workspace)
    memory: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = tuple(member.name for member in self.members)
        self.sizes = sizes = tuple(member.numel for member in self.members)
        self.numel = sum(sizes)
        self.dtype = self.members[0].work_dtype
        self.offsets = [int(offset) for offset in np.concatenate(([0], np.cumsum(sizes)))[:-1]]
        if self.numel >= _INDEX_LIMIT:
            raise ConfigurationError(
                f"reduce: '{self.members[0].name}' must have fewer than 2**32 elements, got {self.numel}; split it"
            )
        self._accumulated = np.zeros(self.numel + TAIL, self.dtype)
        self._residual = np.zeros(self.numel + TAIL if self.feedback else 0, self.dtype)
        self._velocity = np.zeros(self.numel if self.entry.momentum else 0, self.dtype)
        self._next_velocity = np.zeros_like(self._velocity)

    @property
    def shape(self) -> Shape:
        """Names, sizes, shapes and dtype of the bucket, which policies choose by."""
        return Shape(self.names, self.sizes, tuple(member.shape for member in self.members), self.dtype)

    def accumulate(self, gradients: Sequence[NDArray[Any]] | None, scale: float = 1.0) -> Accumulated:
        """Return gradient plus residual.

        Parameters
        ----------
        gradients : sequence of arrays or None
            One for each member; None stands for a rank that has none to give (stale).
        scale : float
            Factor that gradients are multiplied by first.
        """
        if gradients is None:
            return Accumulated(self._accumulated, None, [], stale=True)
        pieces = [Piece(offset, array) for offset, array in zip(self.offsets, gradients, strict=True)]
        residual = self._residual[: self.numel] if self.feedback else None
        velocity = None
        if self.entry.momentum:
            velocity = Velocity(self._velocity, self._next_velocity, self.entry.momentum, self.entry.nesterov)
        return Accumulated(self._accumulated, residual, pieces, False, self.threads, scale, velocity)

    def energy(self, gradients: Sequence[NDArray[Any]]) -> float:
        """Return the squared L2 norm of gradients; overwrites where `accumulate` puts its sum."""
        pieces = [Piece(offset, array) for offset, array in zip(self.offsets, gradients, strict=True)]
        return Accumulated(self._accumulated, None, pieces, threads=self.threads).energy

    def commit(self, sent: NDArray[np.floating] | Selection, finite: bool) -> None:
        """Make ``accumulated - sent`` the residual; where something was not finite nothing of that is kept."""
        if not self.feedback:
            return
        left = self._accumulated[: self.numel]
        with np.errstate(invalid="ignore", over="ignore"):
            if isinstance(sent, Selection):
                cpu.subtract_at(sent.indices, sent.values, left)
            elif sent.base is left.base:
                left[:] = 0
            else:
                np.subtract(left, sent, out=left)
        if not finite:
            left[~np.isfinite(left)] = 0
        if self.entry.momentum:
            if self.entry.masking and isinstance(sent, Selection):
                cpu.clear_at(sent.indices, self._next_velocity)
            if not finite:
                self._next_velocity[~np.isfinite(self._next_velocity)] = 0
            self._velocity, self._next_velocity = self._next_velocity, self._velocity
        self._accumulated, self._residual = self._residual, self._accumulated

    def residuals(self) -> Iterator[tuple[Described, NDArray[np.floating]]]:
        """Return every member with the flat part of the residual that is its own, writable."""
        return self.parts(self._residual)

    def velocities(self) -> Iterator[tuple[Described, NDArray[np.floating]]]:
        """Return every member with its part of the velocity, writable; nothing where there is no momentum."""
        return self.parts(self._velocity) if self.entry.momentum else iter(())

    def parts(self, flat: NDArray[np.floating]) -> Iterator[tuple[Described, NDArray[np.floating]]]:
        """Cut a flat array of the bucket into its members'."""
        for member, offset in zip(self.members, self.offsets, strict=True):
            yield member, flat[offset : offset + member.numel]


def make_buckets(
    members: Sequence[Described], feedback: bool, limit_bytes: int, entry: Entry, threads: int
) -> list[Bucket]:
    """Cut arrays into buckets, in their order; those of one work dtype stay together.

    A bucket is closed before it would pass the limit; an array that is larger has one of its own. Arrays without
    elements are in no bucket.
    """
    groups: list[list[Described]] = []
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        filled = limit_bytes
        for member in members:
            if member.work_dtype != dtype or member.numel == 0:
                continue
            nbytes = member.numel * dtype.itemsize
            if filled + nbytes > limit_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(member)
            filled += nbytes
    return [Bucket(index, group, feedback, entry, threads) for index, group in enumerate(groups)]
