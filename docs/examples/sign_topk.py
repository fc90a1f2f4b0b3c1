"""A compressor in one file: the signs of the largest elements, and one magnitude for all of them."""

from dataclasses import dataclass
from typing import ClassVar

import mpicomp
from mpicomp.compressors import Accumulated, Context
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.setting_checks import check_ratio


@mpicomp.register
@dataclass(frozen=True, repr=False)
class SignTopK(mpicomp.Sparsifier):
    """The k largest elements, each sent as its sign times their mean magnitude; error feedback keeps the difference.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1].
    """

    id: ClassVar[str] = "sign-topk"
    paper: ClassVar[str] = "Basu et al. 2019, arXiv 1906.02367, without local steps"

    wire: ClassVar[str] = "signs"  # how the message stores values: a bit each
    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.id, self.ratio)

    def count(self, numel: int) -> int:
        """Return k, which depends on the length alone, so that ranks exchange no lengths."""
        return num_kept(self.ratio, numel)

    def select(self, accumulated: Accumulated, context: Context) -> mpicomp.Selection:
        """Select what top-k does. The message makes signs of the values; what that takes stays in the residual."""
        return mpicomp.TopK(self.ratio).select(accumulated, context)
