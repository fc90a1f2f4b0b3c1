"""Gradient plus residual, summed in one sweep that may also list candidates for a selection."""

from bisect import bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.candidates import Candidates
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu
from mpicomp.workspace import Workspace

TRAILER = 4
"""Elements after the array in its buffer: room for flags and energies that are summed with it."""


class Piece(NamedTuple):
    """One parameter's gradient inside a bucket: its offset, and a host array of any strides; bfloat16 as uint16."""

    offset: int
    gradient: NDArray[np.generic]


@dataclass
class Velocity:
    """Momentum correction: the velocity before a step, and the array that receives the one after it."""

    before: NDArray[np.floating]
    after: NDArray[np.floating]
    factor: float
    nesterov: bool


class Accumulated:
    """The input of a compressor under error feedback: gradients, the residual, and room for their sum.

    The sum is computed once, by `array`, `part`, `list_above` or `fused`, whichever is called first: a compressor can
    search for elements in the same sweep. The residual is left as it is, so that a step can be undone. So are
    gradients, but for those that lie in the buffer, each at its place.

    Parameters
    ----------
    buffer : array, shape (numel + TRAILER,)
        float32 or float64; receives the sum.
    residual : array, shape (numel,), or None
        Of the dtype of ``buffer``; None without error feedback, or where it is zero.
    pieces : sequence of Piece, or of pairs like it
        The gradients, which fill the bucket; an empty sequence stands for zeros without a residual.
    stale : bool
        Whether this rank asks all ranks to agree again.
    threads : int
        Number of threads that share a sweep.
    scale : float
        Factor of the gradients.
    velocity : Velocity or None
        For momentum before the sum.
    tables : dict, optional
        Keeps pointers to the pieces for the next step.
    """

    def __init__(
        self,
        buffer: NDArray[np.floating],
        residual: NDArray[np.floating] | None,
        pieces: Sequence[tuple[int, NDArray[Any]]],
        stale: bool = False,
        threads: int = 1,
        scale: float = 1.0,
        velocity: Velocity | None = None,
        tables: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.memory = buffer
        """The memory of the sum and its trailer, shape (numel + TRAILER,), which may not be computed yet."""
        self.numel: int = buffer.size - TRAILER
        """Number of elements, without the trailer."""
        self.dtype: np.dtype[Any] = buffer.dtype
        """float32 or float64."""
        self.kernels: Any = kernels.of(buffer)
        """Kernels of the array's device."""
        self.residual = residual
        """The residual before the step, read-only; None where there is none, or zeros."""
        self.stale = stale
        self.threads = threads
        self.lost = 0.0
        """Energy of what `ready` left out of the sum."""
        self.may_be_overwritten = False
        """Whether an exchange may leave the step's residual, or the mean, in place of the sum; see `overwrite`."""
        self.holds = "sum"
        """What the memory holds now: ``"sum"``, ``"residual"`` or ``"mean"``. With a mean all was sent but
        ``unsent``."""
        self.unsent: tuple[int, NDArray[np.floating]] | None = None
        """Where the part begins that was not all sent, and its residual."""
        self._pieces, self._velocity = pieces, velocity
        self.scale = scale
        """Factor of the gradients."""
        self._factor = 1.0  # of the sum, see `divide`
        self._tables = {} if tables is None else tables
        self.is_computed = False
        """Whether the sum was computed."""
        self._device_moments: cpu.Moments | None = None  # as kernels return them: on a device, 0-d arrays
        self._moments: cpu.Moments | None = None
        self._parts_numel = 0  # elements of the sum that were computed by `part`
        self._parts_moments: cpu.Moments | None = None

    @classmethod
    def ready(
        cls, buffer: NDArray[np.floating], energy: float, lost: float, finite: bool, stale: bool
    ) -> "Accumulated":
        """Wrap values that were taken out of a larger array, to be exchanged in its place.

        ``energy`` and ``finite`` are those of the larger array, and ``lost`` is the energy left out of it.
        """
        made = cls(buffer, None, [], stale)
        made.lost = lost
        made._device_moments, made.is_computed = cpu.Moments(0, 0.0, energy, finite), True
        return made

    @property
    def device_moments(self) -> cpu.Moments:
        """Moments of the sum; on a device as 0-d arrays, which kernels take without a wait of the host."""
        if self._device_moments is None:
            self._compute()
        assert self._device_moments is not None
        return self._device_moments

    @property
    def moments(self) -> cpu.Moments:
        """The same as Python numbers; on a device they are read, all at once, at the first access."""
        if self._moments is None:
            self.to_host()
        assert self._moments is not None
        return self._moments

    @property
    def energy(self) -> float:
        """Squared L2 norm of the sum, in float64."""
        return self.moments.energy

    @property
    def finite(self) -> bool:
        """Whether every element of the sum is a finite number."""
        return self.moments.finite

    def array(self) -> NDArray[np.floating]:
        """Return the sum, a contiguous array of shape (numel,)."""
        if self._device_moments is None:
            self._compute()
        return self.memory[: self.numel]

    def part(self, start: int, stop: int) -> NDArray[np.floating]:
        """Return a part of the sum, computed only now if gradients can be cut.

        A caller takes all parts, once each, before anything else: a collective that sends the first part before it
        needs the others lets the network wait for that one only.
        """
        if not self.is_computed and self._parts_numel == 0 and not self._divisible:
            self._compute()
        if not self.is_computed:
            moments = self._sum(start, stop)
            self._parts_numel += stop - start
            self._parts_moments = moments if self._parts_moments is None else self._parts_moments + moments
            if self._parts_numel == self.numel:
                self._device_moments, self.is_computed = self._parts_moments, True
        return self.memory[start:stop]

    def list_above(self, workspace: Workspace, parts: Sequence[tuple[slice, float, int]]) -> list[Candidates]:
        """Return the candidates of parts (slice, bound, room), ascending and disjoint.

        They are listed in the sweep that computes the sum; if it was computed before, none are.
        """
        total = self.memory[: self.numel]
        candidates, listing = [], []
        for place, (part, bound, room) in enumerate(parts):
            entry = Candidates(total, part, bound, room, workspace, f"candidates.{place}", self.kernels, self.threads)
            candidates.append(entry)
            if entry.bound and not self.is_computed:
                listing.append(entry)
        if not self.is_computed:
            self._compute(listing)
        if listing:
            for entry, found in zip(listing, self.to_host(*[entry.found for entry in listing]), strict=True):
                entry.set_found(found)
        return candidates

    def fused(self, kernel: Callable[..., Any], gathers: bool = False) -> Any:
        """Compute the sum by a kernel that selects from it or packs it, and return its result, moments among it.

        It is called with the gradient, the residual or None, and the array that receives the sum, all of which are
        flat; the first may be the last. One that ``gathers`` is called with the gradient or a table of its pieces, its
        factor, and the others.
        """
        assert not self.is_computed, "the sum was computed before"
        out = self.memory[: self.numel]
        if not self._pieces:
            out.fill(0)
        made = kernel(*(self._table(out) if gathers else (self._gathered(out),)), self.residual, out)
        self._device_moments = cpu.Moments(made.nonzero, made.total, made.energy, made.finite)
        self.is_computed = True
        return made

    def _table(self, out: NDArray[np.floating]) -> tuple[Any, float]:
        if self._velocity is not None or not self._pieces:
            return self._gathered(out), 1.0
        flats = self._flat_pieces()
        if len(flats) == 1 and flats[0].dtype == self.dtype:
            return flats[0], self.scale
        table = self._tables["pieces"] = self.kernels.table_of(flats, out, self._tables.get("pieces"))
        return table, self.scale

    def to_host(self, *more: Any) -> list[Any]:
        """Return Python numbers for results of kernels; moments that were not read yet are read with them."""
        if self.kernels is cpu:
            self._moments = self._device_moments or self.device_moments
            return list(more)
        if self._moments is not None:
            return list(to_python(*more))
        nonzero, total, energy, finite, *values = to_python(*self.device_moments, *more)
        self._moments = cpu.Moments(nonzero, total, energy, finite)
        return values

    def divide(self, ranks: int) -> bool:
        """Let the sum be made divided, so that the ranks' add up to the mean; return whether: it may be made by now.

        Only by a power of two, as that rounds nothing (but subnormal numbers), and the mean has the same bits either
        way; and only if it `may_be_overwritten`, since nothing is left of it. Moments stay those of the sum.
        """
        divides = self.may_be_overwritten and not self.is_computed and self._parts_numel == 0 and ranks.bit_count() == 1
        self._factor = 1 / ranks if divides else 1.0
        return divides

    def overwrite(self, by: str) -> bool:
        """Return whether the memory may hold the residual or the mean in place of the sum, and note that it does."""
        if self.may_be_overwritten:
            self.holds = by
        return self.may_be_overwritten

    def memory_of_mean(self, workspace: Workspace) -> NDArray[np.floating]:
        """Return an array for the mean and a trailer: the memory of the sum if that may be overwritten."""
        if not self.may_be_overwritten:
            return workspace.array("mean", self.memory.size, self.dtype)
        self.holds = "mean"
        return self.memory

    def with_trailer(self, *trailer: float) -> NDArray[np.floating]:
        """Return the sum and ``trailer``, a contiguous array of shape (numel + TRAILER,).

        By default the trailer is summed by ranks: whether the sum is not finite, whether this rank is stale, the
        energy, and the lost energy.
        """
        moments, tail = self.device_moments, self.memory[self.numel :]
        if trailer:
            for place, number in enumerate(trailer):
                with np.errstate(over="ignore"):  # of an energy in float32
                    tail[place] = number
        else:
            self.kernels.write_tail(tail, moments.finite, self.stale, moments.energy, self.lost)
        return self.memory

    @property
    def _divisible(self) -> bool:
        """Whether a part of the sum can be computed without the others, which may stay as they are."""
        if getattr(self.kernels, "GATHERS", False) or not self._pieces:
            return False
        return all(
            gradient.flags.c_contiguous and not np.may_share_memory(gradient, self.memory)
            for _, gradient in self._pieces
        )

    def _compute(self, listing: Sequence[Candidates] = ()) -> None:
        assert not self.is_computed, "the sum was computed before"
        assert self._parts_numel == 0, "parts of the sum were computed before"
        self._device_moments, self.is_computed = self._sum(0, self.numel, listing), True

    def _sum(self, start: int, stop: int, listing: Sequence[Candidates] = ()) -> cpu.Moments:
        """Compute a part of the sum, list candidates, and return the moments of the part."""
        out, residual, kernels = self.memory[: self.numel], self.residual, self.kernels
        moments: cpu.Moments | None = None
        if not self._pieces:
            out[start:stop] = 0
        gathers = kernels is not cpu and bool(self._pieces) and getattr(kernels, "GATHERS", False)
        changes = not gathers and (self._velocity is not None or self.scale != 1)
        first_piece = max(0, bisect_right(self._pieces, start, key=itemgetter(0)) - 1)
        for offset, gradient in [(0, self._gathered(out))] if gathers else islice(self._pieces, first_piece, None):
            if offset >= stop:
                break
            low, high = max(start, offset), min(stop, offset + gradient.size)
            if low >= high:
                continue
            flat = gradient if gathers else self._flat(gradient, offset, low, high, (self.dtype,))
            if changes:
                flat = self._scaled(flat, low, high)
            for first, last, entry in _cuts(low, high, listing) if listing else ((low, high, None),):
                source, target = flat[first - low : last - low], out[first:last]
                before = None if residual is None else residual[first:last]
                if entry is None:
                    added = kernels.accumulate(source, before, target, self.threads, self._factor)
                else:
                    entry.found, added = kernels.accumulate_candidates(
                        source, before, target, entry.bound, first, entry.index, entry.bits, entry.found,
                        self.threads,
                    )  # fmt: skip
                moments = added if moments is None else moments + added
        return cpu.Moments(0, 0.0, 0.0, True) if moments is None else moments

    def _gathered(self, out: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return the input to the sum as one flat array, in ``out`` if there are several pieces or none."""
        if not self._pieces:
            return out
        flats, scale = self._flat_pieces(), 1.0 if self._velocity is not None else self.scale
        flat = flats[0]
        if len(flats) > 1 or scale != 1 or flat.dtype != self.dtype:
            self._tables["pieces"] = self.kernels.concatenate(flats, out, scale, self._tables.get("pieces"))
            flat = out
        return flat if self._velocity is None else self._scaled(flat, 0, self.numel)

    def _flat_pieces(self) -> list[NDArray[Any]]:
        readable = self.dtype, np.float16, np.uint16
        return [
            self._flat(gradient, offset, offset, offset + gradient.size, readable) for offset, gradient in self._pieces
        ]

    def _flat(
        self, gradient: NDArray[Any], offset: int, start: int, stop: int, readable: Sequence[Any]
    ) -> NDArray[Any]:
        """Return a part of a piece as a flat array; of strides or dtypes that no kernel reads, copied into the sum."""
        if gradient.flags.c_contiguous:
            gradient = gradient.reshape(-1)[start - offset : stop - offset]
            if gradient.dtype in readable and gradient.dtype.isnative:
                return gradient
        out = self.memory[start:stop]
        _copy(gradient, out)
        return out

    def _scaled(self, flat: NDArray[Any], start: int, stop: int) -> NDArray[np.floating]:
        """Return a part of the gradient with momentum and scale applied, in the memory of the sum."""
        out, velocity = self.memory[start:stop], self._velocity
        if velocity is not None:
            before, after = velocity.before[start:stop], velocity.after[start:stop]
            kernels.momentum(flat, self.scale, before, velocity.factor, velocity.nesterov, after, out)
            return out
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(flat, flat.dtype.type(self.scale), out=out)
        return out


def _cuts(start: int, stop: int, listing: Sequence[Candidates]) -> list[tuple[int, int, Candidates | None]]:
    cuts: list[tuple[int, int, Candidates | None]] = []
    for entry in listing:
        first, last = max(start, entry.part.start), min(stop, entry.part.stop)
        if first < last:
            if start < first:
                cuts.append((start, first, None))
            cuts.append((first, last, entry))
            start = last
    if start < stop:
        cuts.append((start, stop, None))
    return cuts


def _copy(gradient: NDArray[np.generic], out: NDArray[np.floating]) -> None:
    """Widen or pack a gradient into a flat array, without a temporary one."""
    contiguous = gradient.flags.c_contiguous and gradient.dtype.isnative
    if contiguous and gradient.dtype in (np.uint16, np.float16):
        kernels.widen(gradient.reshape(-1).view(np.uint16), "bf16" if gradient.dtype == np.uint16 else "fp16", out)
    elif gradient.dtype == np.uint16:
        words = out.view(np.uint32)  # bfloat16 is the upper half of a float32
        np.copyto(words.reshape(gradient.shape), gradient)
        np.left_shift(words, 16, out=words)
    else:
        np.copyto(out.reshape(gradient.shape), gradient, casting="same_kind")
