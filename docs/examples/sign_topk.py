"""A compressor in one file: the signs of the largest elements, and one magnitude for all of them."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import mpicomp
from mpicomp.compressors import Accumulated, Context


@mpicomp.register
@dataclass(frozen=True, repr=False)
class SignTopK(mpicomp.Sparsifier):
    """The k largest elements, each sent as its sign times their mean magnitude."""

    id: ClassVar[str] = "sign-topk"
    paper: ClassVar[str] = "Basu et al. 2019, arXiv 1906.02367, without local steps"
    wire: ClassVar[str] = "signs"  # how values travel: a bit each, and their mean magnitude
    ratio: float = 0.01

    def count(self, numel: int) -> int:
        """Return k, which depends on the length alone, so that ranks exchange no lengths."""
        return max(1, round(self.ratio * numel))

    def select(self, accumulated: Accumulated, context: Context) -> mpicomp.Selection:
        """Return the indices of the k largest, ascending, and the array's values there."""
        array = accumulated.array()
        indices = np.sort(np.argpartition(np.abs(array), -self.count(array.size))[-self.count(array.size) :])
        return mpicomp.Selection(indices.astype(np.uint32), array[indices])
