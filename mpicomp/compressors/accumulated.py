"""Gradient plus residual, summed in one sweep that may also list candidates, which answer queries of a selection."""

from bisect import bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.wire import Selection
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu
from mpicomp.workspace import Workspace

TRAILER = 4
"""Elements after the array in its buffer: room for flags and energies that are summed with it."""


_WORDS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.uint64),
}


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


class Candidates:
    """The elements of a part of the sum from a bound on, and answers that hold for all elements of the part.

    `Accumulated.list_above` makes them. Questions above the bound, a magnitude from an earlier step, are answered from
    the list of at most ``room`` elements, others by a sweep over the array: the answers are the same. A bound of 0
    lists nothing. ``name`` is that of the arrays in the workspace.
    """

    def __init__(
        self, total: NDArray[np.floating], part: slice, bound: float, room: int, workspace: Workspace, name: str,
        kernels: Any, threads: int,
    ) -> None:  # fmt: skip
        self.part = part
        self.array = total[part]
        """The part of the sum."""
        self._total, self._workspace, self._name = total, workspace, name
        self.kernels, self.threads = kernels, threads
        self._word = word = _WORDS[total.dtype]
        size = min(room, self.array.size) if bound > 0 else 0
        self.bound: int = cpu.magnitude_bits(bound, total.dtype) if size else 0
        """Magnitude bits (`mpicomp.kernels.cpu.magnitude_bits`) from which on elements are listed; 0 lists none."""
        self.index = workspace.scratch(name + ".index", size, np.uint32)
        """Positions of listed elements in the whole sum, ascending."""
        self.bits = workspace.scratch(name + ".bits", size, word)
        """Magnitude bits of listed elements."""
        self.found = 0
        """Number of elements from the bound on."""
        self.listed = 0
        """Number of elements in the list; 0 if not all that were found did fit."""
        self._scratch: NDArray[Any] | None = None  # listed magnitudes, the k largest last, once k were selected

    def count(self, threshold: float) -> int:
        """Count the elements above a threshold."""
        if self._covers(threshold):
            tail = self.kernels.tail_statistics(self.bits[: self.listed].view(self.array.dtype), threshold)
        else:
            tail = self.kernels.tail_statistics(self.array, threshold, 1, self.threads)
        [count] = to_python(tail.count)
        return int(count)

    def tail(self, threshold: float, stride: int = 1) -> cpu.TailStatistics:
        """Count the elements above a threshold, and sum their excess, in the array: a list would round differently."""
        return cpu.TailStatistics(
            *to_python(*self.kernels.tail_statistics(self.array, threshold, stride, self.threads))
        )

    def top(self) -> float:
        """Return the largest magnitude."""
        listed = self.bits[: self.listed]
        [bits] = to_python(listed.max() if self.listed else self.kernels.kth_magnitude(self.array, 1))
        return cpu.magnitude_of(int(bits), self.array.dtype)

    def above(self, threshold: float, expected: int, known: bool = False) -> Selection:
        """Select the elements above a threshold; ``expected`` is their number, exact if it is ``known``."""
        listed = self.listed if self._covers(threshold) else 0
        selection = self._selection(listed or max(1, expected))
        if listed:
            indices, values = selection.indices, selection.values
            found = self.kernels.select_listed(
                self.index[:listed], self.bits[:listed], threshold, self._total, indices, values
            )
        else:
            found = self._select_above(threshold, selection.indices, selection.values)
        [count] = [expected] if known else to_python(found)
        if count > selection.indices.size:
            selection = self._selection(count)
            self._select_above(threshold, selection.indices, selection.values)
        return Selection(selection.indices[:count], selection.values[:count])

    def largest(self, k: int) -> tuple[Selection, int]:
        """Select the k largest, exactly; return them, ascending by index, and the smallest of their magnitude bits.

        Of equal magnitudes the lower index goes first, and NaN is larger than infinity. On a device the bits are a 0-d
        array.
        """
        selection, array = self._selection(k), self.array
        if k // 4 < self.listed < k:
            self._list_more(k)
        listed = self.listed
        if k <= listed:
            self._scratch = scratch = self._workspace.scratch(self._name + ".scratch", listed, self._word)
            bits = self.kernels.select_candidates(
                self.index[:listed], self.bits[:listed], scratch, self._total, selection.indices, selection.values
            )
        else:
            bits = self.kernels.kth_magnitude(array, k)
            self.kernels.select_largest(array, bits, selection.indices, selection.values)
            if self.part.start:
                np.add(selection.indices, np.uint32(self.part.start), out=selection.indices)
        return selection, bits

    def reserve(self, k: int) -> int:
        """Return the magnitude bits of the candidate of rank 3 k / 2, or of the last; 0 if `largest` had no list."""
        scratch, rank = self._scratch, k + k // 2
        if scratch is None:
            return 0
        listed = scratch.size
        if isinstance(scratch, np.ndarray):  # which `largest` has left in two parts: a radix selection takes longer
            if listed <= rank:
                return int(scratch[: listed - k].min(initial=scratch[listed - k]))
            if k < rank:
                scratch[: listed - k].partition(listed - rank)
            return int(scratch[listed - rank])
        magnitudes = self.bits[:listed].view(self.array.dtype)
        bits: int = self.kernels.kth_magnitude(magnitudes, min(listed, rank))
        return bits

    def bound_for_next(self, k: int, threshold: float, before: float, reserve: int) -> float:
        """Return the bound of the next step's candidates, which is meant to list half as many again as k.

        Under error feedback elements crowd below the threshold, so that no fixed fraction of it would do, and for the
        first few hundred steps it rises. ``before`` is the threshold of the step before or 0.
        """
        found, listed = self.found, self.listed
        if listed == 0 and found > k:  # too many to be stored: assume that they are spread evenly
            bound = cpu.magnitude_of(self.bound, self.array.dtype)
            return threshold - (threshold - bound) * 0.5 * k / (found - k)
        if listed < k:
            return 0.97 * threshold
        lower = cpu.magnitude_of(reserve, self.array.dtype)
        if listed < k + k // 2:
            lower *= 0.98
        return lower * (min(max(threshold / before, 0.8), 1.2) if before > 0 else 1.0)

    def _list_more(self, wanted: int) -> None:
        # With a lower bound, in a fraction of the time of a radix selection.
        dtype = self.array.dtype
        for factor in (0.95, 0.7):
            bound = factor * cpu.magnitude_of(self.bound, dtype)
            [found] = to_python(self._select_above(bound, self.index, self.bits.view(dtype)))
            self.found, self.listed = found, found if found <= self.index.size else 0
            self.bound = cpu.magnitude_bits(bound, dtype) + 1
            listed = self.bits[:found]
            np.bitwise_and(listed, cpu.mask_of(dtype), out=listed)
            if found >= wanted:
                return

    def _covers(self, threshold: float) -> bool:
        return self.listed > 0 and cpu.magnitude_bits(threshold, self.array.dtype) >= self.bound

    def _select_above(self, threshold: float, indices: NDArray[np.uint32], values: NDArray[np.floating]) -> Any:
        return self.kernels.select_above(self.array, threshold, self.part.start, indices, values, 0)

    def _selection(self, size: int) -> Selection:
        indices = self._workspace.array(self._name + ".indices", size, np.uint32)
        return Selection(indices, self._workspace.array(self._name + ".values", size, self.array.dtype))


class Accumulated:
    """The input of a compressor under error feedback: gradients, the residual, and room for their sum.

    The sum is computed once, by `array`, `part`, `list_above` or `fused`, whichever is called first: a compressor can
    search for elements in the same sweep. The residual is not changed, so that a step can be undone, nor are
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
        self.whole: NDArray[np.floating] = buffer[: self.numel]
        """The memory of the sum alone."""
        self.dtype: np.dtype[Any] = buffer.dtype
        """float32 or float64."""
        self.kernels: Any = kernels.of(buffer)
        """Kernels of the array's device."""
        self.threads = threads
        self._tables = {} if tables is None else tables
        self.begin(residual, pieces, stale, scale, velocity)

    def begin(
        self,
        residual: NDArray[np.floating] | None,
        pieces: Sequence[tuple[int, NDArray[Any]]],
        stale: bool = False,
        scale: float = 1.0,
        velocity: Velocity | None = None,
    ) -> None:
        """Take the gradients of another step, to be summed in the same memory."""
        self.residual, self._pieces, self._velocity = residual, pieces, velocity
        self.stale = stale
        self.scale = scale
        """Factor of the gradients."""
        self.lost = 0.0
        """Energy that `ready` left out of the sum."""
        self.may_be_overwritten = False
        """Whether an exchange may leave the step's residual, or the mean, in place of the sum; see `overwrite`."""
        self.holds = "sum"
        """Content of the memory: ``"sum"``, ``"residual"`` or ``"mean"``. With a mean all was sent but ``unsent``."""
        self.unsent: tuple[int, NDArray[np.floating]] | None = None
        """Where the part begins that was not all sent, and its residual."""
        self._factor = 1.0  # of the sum, see `divide`
        self._device_moments: cpu.Moments | None = None  # as kernels return them: on a device, 0-d arrays
        self._moments: cpu.Moments | None = None
        self._parts: Sequence[tuple[int, cpu.Moments]] = ()  # elements and moments of parts that `part` has computed

    def release(self) -> None:
        """Drop the gradients of a step that is over."""
        self.residual, self._pieces, self._velocity = None, (), None

    @property
    def is_computed(self) -> bool:
        """Whether the sum was computed."""
        return self._device_moments is not None

    @classmethod
    def ready(
        cls, buffer: NDArray[np.floating], energy: float, lost: float, finite: bool, stale: bool
    ) -> "Accumulated":
        """Wrap values that were taken out of a larger array, to be exchanged in its place.

        ``energy`` and ``finite`` are those of the larger array, and ``lost`` is the energy left out of it.
        """
        made = cls(buffer, None, [], stale)
        made.lost = lost
        made._device_moments = cpu.Moments(0, 0.0, energy, finite)
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
        return self.whole

    def lent(self) -> NDArray[np.floating] | None:
        """Return the gradient's own memory where the sum is no more than that, for one that need not be computed."""
        is_computed = self._device_moments is not None or bool(self._parts)
        return None if is_computed or self.residual is not None else self._gradient_alone()

    def _gradient_alone(self) -> NDArray[np.floating] | None:
        # Of the host, in one piece, with nothing to be changed before the residual is added
        if self.kernels is not cpu or len(self._pieces) != 1 or self.scale != 1 or self._velocity is not None:
            return None
        gradient = self._pieces[0][1]
        if gradient.dtype != self.dtype or not gradient.flags.c_contiguous:
            return None
        return gradient if gradient.ndim == 1 else gradient.reshape(-1)

    def part(self, start: int, stop: int) -> NDArray[np.floating]:
        """Return a part of the sum, computed only now if gradients can be cut.

        A caller takes all parts, once each, before anything else: a collective that sends the first part before it
        needs the others lets the network wait for that one only.
        """
        if not self.is_computed and not self._parts and not self._divisible:
            self._compute()
        if not self.is_computed:
            moments = self._sum(start, stop)
            if stop > start:
                self._parts = [*self._parts, (stop - start, moments)]
            if sum(numel for numel, _ in self._parts) == self.numel:
                first, *others = [moments for _, moments in self._parts]
                self._device_moments = sum(others, first)
        return self.memory[start:stop]

    def list_above(self, workspace: Workspace, parts: Sequence[tuple[slice, float, int]]) -> list[Candidates]:
        """Return the candidates of parts (slice, bound, room), ascending and disjoint.

        They are listed in the sweep that computes the sum; if it was computed before, or on a GPU, none are.
        """
        lists = self.kernels is cpu or hasattr(self.kernels, "accumulate_candidates")
        candidates, listing = [], []
        for place, (part, bound, room) in enumerate(parts):
            entry = Candidates(
                self.whole, part, bound if lists else 0.0, room, workspace, f"candidates.{place}", self.kernels,
                self.threads,
            )  # fmt: skip
            candidates.append(entry)
            if entry.bound and self._device_moments is None:
                listing.append(entry)
        if self._device_moments is None:
            self._compute(listing)
        if listing:
            for entry, found in zip(listing, self.to_host(*[entry.found for entry in listing]), strict=True):
                entry.found, entry.listed = found, found if found <= entry.index.size else 0
        return candidates

    def fused(self, kernel: Callable[..., Any], gathers: bool = False) -> Any:
        """Compute the sum by a kernel that selects from it or packs it, and return its result, moments among it.

        It is called with the gradient, the residual or None, and the array that receives the sum, all of which are
        flat; the first may be the last. One that ``gathers`` is called with the gradient or a table of its pieces, its
        factor, and the others.
        """
        assert not self.is_computed, "the sum was computed before"
        out = self.whole
        if not self._pieces:
            out.fill(0)
        made = kernel(*(self._table(out) if gathers else (self._gathered(out),)), self.residual, out)
        self._device_moments = cpu.Moments(made.nonzero, made.total, made.energy, made.finite)
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
        is_computed = self._device_moments is not None or bool(self._parts)
        divides = self.may_be_overwritten and not is_computed and ranks.bit_count() == 1
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
        if self._device_moments is None:
            self._compute()
        moments, tail = self._device_moments, self.memory[self.numel :]
        assert moments is not None
        if trailer:
            for place, number in enumerate(trailer):
                with np.errstate(over="ignore"):  # of an energy in float32
                    tail[place] = number
        else:
            self.kernels.write_tail(tail, moments.finite, self.stale, moments.energy, self.lost)
        return self.memory

    @property
    def _divisible(self) -> bool:
        if getattr(self.kernels, "GATHERS", False) or not self._pieces:
            return False
        return all(
            gradient.flags.c_contiguous and not np.may_share_memory(gradient, self.memory)
            for _, gradient in self._pieces
        )

    def _compute(self, listing: Sequence[Candidates] = ()) -> None:
        assert self._device_moments is None, "the sum was computed before"
        assert not self._parts, "parts of the sum were computed before"
        alone = self._gradient_alone()
        if alone is None or len(listing) > 1 or (listing and listing[0].array.size != self.numel):
            self._device_moments = self._sum(0, self.numel, listing)
        elif listing:
            [entry] = listing
            entry.found, self._device_moments = cpu.accumulate_candidates(
                alone, self.residual, self.whole, entry.bound, 0, entry.index, entry.bits, 0, self.threads
            )
        else:
            self._device_moments = cpu.accumulate(alone, self.residual, self.whole, self.threads, self._factor)

    def _sum(self, start: int, stop: int, listing: Sequence[Candidates] = ()) -> cpu.Moments:
        out, residual, kernels, pieces = self.whole, self.residual, self.kernels, self._pieces
        moments: cpu.Moments | None = None
        if not pieces:
            out[start:stop] = 0
        gathers = kernels is not cpu and bool(pieces) and getattr(kernels, "GATHERS", False)
        changes = not gathers and (self._velocity is not None or self.scale != 1)
        if gathers:
            pieces = [(0, self._gathered(out))]
        elif start:
            pieces = pieces[max(0, bisect_right(pieces, start, key=itemgetter(0)) - 1) :]
        for offset, gradient in pieces:
            if offset >= stop:
                break
            low, high = max(start, offset), min(stop, offset + gradient.size)
            if low >= high:
                continue
            flat = gradient if gathers else self._flat(gradient, offset, low, high, (self.dtype,))
            if changes:
                flat = self._scaled(flat, low, high)
            for first, last, entry in _cuts(low, high, listing) if listing else ((low, high, None),):
                source, target, before = flat, out, residual
                if last - first != flat.size:
                    source = flat[first - low : last - low]
                if last - first != self.numel:
                    target, before = out[first:last], None if residual is None else residual[first:last]
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
        # The input to the sum as one flat array, in ``out`` if there are several pieces or none.
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
        # A part of a piece, copied into the sum where its strides or dtype are those of no kernel.
        if gradient.flags.c_contiguous:
            gradient = gradient.reshape(-1)[start - offset : stop - offset]
            if gradient.dtype in readable and gradient.dtype.isnative:
                return gradient
        out = self.memory[start:stop]
        _copy(gradient, out)
        return out

    def _scaled(self, flat: NDArray[Any], start: int, stop: int) -> NDArray[np.floating]:
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
    contiguous = gradient.flags.c_contiguous and gradient.dtype.isnative
    if contiguous and gradient.dtype in (np.uint16, np.float16):
        kernels.widen(gradient.reshape(-1).view(np.uint16), "bf16" if gradient.dtype == np.uint16 else "fp16", out)
    elif gradient.dtype == np.uint16:
        words = out.view(np.uint32)  # bfloat16 is the upper half of a float32
        np.copyto(words.reshape(gradient.shape), gradient)
        np.left_shift(words, 16, out=words)
    else:
        np.copyto(out.reshape(gradient.shape), gradient, casting="same_kind")
