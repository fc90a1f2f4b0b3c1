"""The elements of largest magnitude, exactly."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Selection, Sparsifier, check_ratio, kept
from mpicomp.compressors.registry import register_compressor
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu.bits import magnitude_of
from mpicomp.workspace import Workspace

_ROOM = 4  # candidates that are stored, as a multiple of k
_MARGIN = 0.8  # the bound for candidates, as a fraction of the threshold of the step before


@register_compressor
@dataclass(frozen=True)
class TopK(Sparsifier):
    """Exact top-k by magnitude; of equal magnitudes the lower index goes first, NaN counts as largest.

    Candidates are listed in the sweep that adds gradient and residual, by a bound from the step before; where
    the bound turns out too high or too low a radix selection finds the exact threshold. The result never
    depends on the bound.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.

    Examples
    --------
    >>> TopK(ratio=0.01).count(1000)
    10
    >>> TopK(ratio=1.5)
    Traceback (most recent call last):
    mpicomp.errors.ConfigurationError: topk: ratio is the kept fraction and must be in (0, 1], got 1.5
    """

    id: ClassVar[str] = "topk"
    paper: ClassVar[str] = "Aji and Heafield 2017, arXiv 1704.05021; whole buckets, exact, with error feedback"

    ratio: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio("topk", self.ratio))

    def count(self, numel: int) -> int:
        """Give k."""
        return kept(self.ratio, numel)

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Give a 32-bit index and the value, for the kept fraction."""
        return self.ratio * (4 + itemsize)

    def select(self, accumulated: Accumulated, memory: dict[str, Any], workspace: Workspace) -> Selection:
        """Select the k largest; see `Sparsifier.select`."""
        k = self.count(accumulated.numel)
        word = np.uint32 if accumulated.dtype == np.float32 else np.uint64
        room = min(accumulated.numel, _ROOM * k)
        index = workspace.array("topk.index", room, np.uint32)
        bits = workspace.array("topk.bits", room, word)
        selection = Selection(
            workspace.array("topk.indices", k, np.uint32),
            workspace.array("topk.values", k, accumulated.dtype),
        )
        found = accumulated.candidates(memory["bound"], index, bits) if "bound" in memory else -1
        array = accumulated.array()
        if k <= found <= room:
            scratch = workspace.array("topk.scratch", found, word)
            threshold = cpu.select_candidates(
                index[:found], bits[:found], scratch, array, selection.indices, selection.values
            )
        else:
            threshold = cpu.kth_magnitude(array, k)
            cpu.select_largest(array, threshold, selection.indices, selection.values)
        memory["bound"] = cpu.magnitude_bits(_MARGIN * magnitude_of(threshold, array.dtype), array.dtype)
        return selection
