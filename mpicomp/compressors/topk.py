"""The elements of largest magnitude, exactly."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import BucketParameters, bound, match_layer_setting, num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import PackedSelection, Sparsifier
from mpicomp.compressors.wire import STALE, Selection, message_to_fill
from mpicomp.gpu import current_device
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_layers, check_ratio

_MAX_LISTED = 4  # candidates that are stored, as a multiple of k


@register
@dataclass(frozen=True, repr=False)
class TopK(Sparsifier):
    """Exact top-k by magnitude; of equal magnitudes the lower index goes first, NaN counts as largest.

    ::

        k = max(1, round(ratio * x.size))
        i = np.sort(np.argsort(-abs(x), kind="stable")[:k])
        sent[i] = x[i]

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    layers : mapping of str to float, optional
        Ratios of parameters whose names match a pattern (as file names do: ``"embedding.*"``); the first pattern that
        matches counts. Each of these parameters is selected from separately, and so is each run of the others.

    Examples
    --------
    >>> TopK(ratio=0.01).count(1000)
    10
    >>> compressor = TopK(ratio=0.01, layers={"*.bias": 1.0}).bind(["fc.weight", "fc.bias"], [1000, 10])
    >>> compressor.count(1010)
    20
    """

    id: ClassVar[str] = "topk"
    paper: ClassVar[str] = "Aji and Heafield 2017, arXiv 1704.05021; whole buckets, exact, with error feedback"

    layer_setting: ClassVar[str | None] = "ratio"
    gpu_sources: ClassVar[Sequence[str]] = ("accumulate", "select", "message", "indices", "scatter")

    ratio: float = 0.01
    layers: Mapping[str, float] | None = None
    parts: tuple[tuple[int, int], ...] = bound(())
    """Elements and k of each selection in a bucket whose parts have different ratios."""

    @classmethod
    def suggested(cls, normalises: bool = True) -> "list[TopK]":
        # For most networks, for slow ones, and for fast ones, where compute time counts
        return [TopK(wire="bf16"), TopK(wire="q4"), TopK()]

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = check_layers("topk", "ratios", self.layers, lambda name, ratio: check_ratio("topk", ratio, name))
        self._set(layers=layers)

    def bind_to(self, bucket: BucketParameters) -> Self:
        if not self.layers:
            return self
        parts: list[tuple[int, float, bool]] = []  # elements, ratio, whether a pattern gave it
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            layer_ratio = match_layer_setting(self.layers, name, None)
            if layer_ratio is None and parts and not parts[-1][2]:
                parts[-1] = (parts[-1][0] + size, self.ratio, False)
            else:
                parts.append((size, self.ratio if layer_ratio is None else layer_ratio, layer_ratio is not None))
        return replace(self, parts=tuple((size, num_kept(ratio, size)) for size, ratio, _ in parts))

    def count(self, numel: int) -> int:
        return sum([k for _, k in self._parts(numel)]) if self.parts else num_kept(self.ratio, numel)

    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        numel = accumulated.numel
        if not self.parts:
            return largest_of_parts(accumulated, context, [(0, numel, num_kept(self.ratio, numel))])
        parts, start = [], 0
        for size, k in self._parts(numel):
            parts.append((start, start + size, k))
            start += size
        return largest_of_parts(accumulated, context, parts)

    def select_packed(self, accumulated: Accumulated, context: Context) -> PackedSelection | None:
        if self.parts or self.wire is not None or accumulated.is_computed or not hasattr(accumulated.kernels, "topk"):
            return None
        k, numel, dtype = num_kept(self.ratio, accumulated.numel), accumulated.numel, accumulated.dtype
        nbytes, flags = self.message_bytes(k, numel, dtype), STALE * accumulated.stale
        message, values, form = message_to_fill(context.workspace, nbytes, k, dtype, self.indices, flags)
        return PackedSelection(_fused(accumulated, context, k, values, form), values, message)

    def _parts(self, numel: int) -> Sequence[tuple[int, int]]:
        # Elements and k of every selection in its bucket, or in any array of another length.
        is_bound = bool(self.parts) and sum(size for size, _ in self.parts) == numel
        return self.parts if is_bound else [(numel, num_kept(self.ratio, numel))]


def largest_of_parts(accumulated: Accumulated, context: Context, parts: Sequence[tuple[int, int, int]]) -> Selection:
    """Select the k largest elements of each part of a bucket, exactly; valid until the next call for the same bucket.

    Parts are (start, stop, k): ascending, disjoint, none empty. The memory keeps bounds of the next step's candidates.
    """
    whole = len(parts) == 1 and parts[0][1] - parts[0][0] == accumulated.numel
    kernels = accumulated.kernels
    if kernels is not cpu and whole and not accumulated.is_computed and hasattr(kernels, "topk"):
        k, dtype = parts[0][2], accumulated.dtype
        values = context.workspace.array("topk.values", k, dtype)
        return Selection(_fused(accumulated, context, k, values), values)
    memory, dtype = context.memory, accumulated.dtype
    bounds, before = memory.get("bounds", ()), memory.get("thresholds", ())
    if len(bounds) != len(parts) or len(before) != len(parts):
        bounds = before = [0.0] * len(parts)
    wanted = []
    for (start, stop, k), limit in zip(parts, bounds, strict=True):
        wanted.append((slice(start, stop), limit, _MAX_LISTED * k))
    candidates = accumulated.list_above(context.workspace, wanted)
    selections, bits = [], []
    for entry, (_, _, k) in zip(candidates, parts, strict=True):
        selection, threshold = entry.largest(k)
        selections.append(selection)
        bits += [threshold, entry.reserve(k)]
    bits = accumulated.to_host(*bits)
    # Nothing is learned from infinity and NaN, which no checkpoint in JSON could hold either.
    thresholds, bounds = [], []
    for place, (entry, (_, _, k)) in enumerate(zip(candidates, parts, strict=True)):
        magnitude = cpu.magnitude_of(bits[2 * place], dtype)
        thresholds.append(magnitude if math.isfinite(magnitude) else 0.0)
        limit = entry.bound_for_next(k, thresholds[-1], before[place], bits[2 * place + 1])
        bounds.append(limit if math.isfinite(limit) else 0.0)
    memory["thresholds"], memory["bounds"] = thresholds, bounds
    if len(selections) == 1:
        return selections[0]
    count = sum(k for _, _, k in parts)
    indices = context.workspace.array("topk.indices", count, np.uint32)
    values = context.workspace.array("topk.values", count, accumulated.dtype)
    np.concatenate([selection.indices for selection in selections], out=indices)
    np.concatenate([selection.values for selection in selections], out=values)
    return Selection(indices, values)


def scratch_for(accumulated: Accumulated, context: Context, k: int) -> Any:
    """Return the scratch of fused kernels for about k candidates, in powers of two so that a varying k needs few."""
    numel, dtype = accumulated.numel, accumulated.dtype
    room = 1 << (_MAX_LISTED * k - 1).bit_length()
    make = accumulated.kernels.Workspace
    return context.workspace.made(("fused", numel, room, dtype), lambda: make(numel, room, dtype))


def bounds_for(context: Context, name: str) -> tuple[Any, Any]:
    """Return the array of one number that bounds a step's candidates, and another for the next step's bound.

    A step that is undone brings the first one back.
    """
    device, found = current_device(), context.memory.get(name)
    bound = device.zeros(1, np.uint64) if found is None else device.to_device(found)
    one, other = context.workspace.made((name, 2), lambda: (device.zeros(1, np.uint64), device.zeros(1, np.uint64)))
    following = context.memory[name] = other if bound is one else one
    return bound, following


def _fused(accumulated: Accumulated, context: Context, k: int, values: Any, form: tuple[Any, ...] = ()) -> Any:
    # Returns the indices.
    kernels = accumulated.kernels
    scratch, (bound, following) = scratch_for(accumulated, context, k), bounds_for(context, "topk.bound")
    indices = context.workspace.array("topk.indices", k, np.uint32)
    output = kernels.Output(indices, values, message=kernels.Message(*form))
    accumulated.fused(lambda *arrays: kernels.topk(*arrays, bound, output, scratch, following))
    return indices
