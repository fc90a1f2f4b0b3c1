"""The elements of largest magnitude of each chunk."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import Selection
from mpicomp.registry import register
from mpicomp.setting_checks import check_least


@register
@dataclass(frozen=True, repr=False)
class ChunkTopK(Sparsifier):
    """Exact top-k of each chunk of a flat bucket; of equal magnitudes the lower index goes first, NaN is largest.

    ::

        for start in range(0, x.size, chunk):
            i = start + np.argsort(-abs(x[start : start + chunk]), kind="stable")[:k]
            sent[i] = x[i]

    All parts of a model are sent equally often, whatever their scale; a chunk stays in the cache while it is processed.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1]; k of a chunk is the nearest integer to ``ratio * chunk``, at least 1.
    chunk : int
        Elements of a chunk; the bucket's last one may have fewer.
    wire, indices
        See `Sparsifier`.

    Notes
    -----
    Different from published code: chunks are of the flat bucket, not tiles whose sides divide those of each matrix;
    indices are coded over the whole bucket, which takes no more bits.

    Examples
    --------
    >>> ChunkTopK(ratio=64 / 4096).count(3 * 4096 + 100)
    194
    """

    id: ClassVar[str] = "chunktopk"
    paper: ClassVar[str] = "the selection of SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706; chunks of flat buckets"

    ratio: float = 0.01
    chunk: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self.id, "chunk", self.chunk, 1)

    def count(self, numel: int) -> int:
        whole, rest = divmod(numel, self.chunk)
        return whole * num_kept(self.ratio, self.chunk) + num_kept(self.ratio, rest)

    def select(self, accumulated: GradientWithResidual, context: Context) -> Selection:
        array = accumulated.array()
        count = self.count(array.size)
        indices = context.workspace.array("chunktopk.indices", count, np.uint32)
        values = context.workspace.array("chunktopk.values", count, accumulated.dtype)
        of_rest = num_kept(self.ratio, array.size % self.chunk)
        kernels.select_in_chunks(array, self.chunk, num_kept(self.ratio, self.chunk), of_rest, indices, values)
        return Selection(indices, values)
