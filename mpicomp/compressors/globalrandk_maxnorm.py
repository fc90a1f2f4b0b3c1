"""Random elements, the same on all ranks, on a grid that all ranks share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import SharedSparsifier
from mpicomp.compressors.maxnorm import MaxNorm, check_bits
from mpicomp.compressors.randomk import one_of_each
from mpicomp.errors import ConfigurationError
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice


@register
@dataclass(frozen=True, repr=False)
class GlobalRandKMaxNorm(SharedSparsifier):
    """GlobalRandK-MaxNorm (arXiv 2109.12497): every element has its turn, and then travels as in `MaxNorm`.

    ::

        i = positions_of(seed, step)  # k of them, the same on all ranks; each position once in 1 / ratio steps
        sent[i] = MaxNorm(bits, rounding=rounding)(x[i])

    The array is cut into k parts of nearly equal length; each step sends one element of each, the next one in the next
    step, from a random element on: all are sent before any is sent again, as with a stored permutation. No index
    travels, and elements that are not selected are zero on all ranks.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1]; k is the nearest integer to ``ratio * numel``, at least 1.
    bits : int, or sequence of int
        See `MaxNorm`.
    rounding : {"nearest", "stochastic"}
        To the nearest with error feedback, or at random without, as in the paper.

    Notes
    -----
    Values are not multiplied by ``1 / ratio``. In the paper's form, ``rounding="stochastic"``, the mean over draws and
    turns is therefore ``ratio`` times the gradient, for which a larger learning rate can make up. With error feedback
    every element is sent sooner or later.

    Different from the paper and its code: error feedback; the permutation; and in the code each rank keeps its
    gradient where nothing is selected, so that models of different ranks diverge.

    Examples
    --------
    >>> import numpy as np
    >>> compressor, out = GlobalRandKMaxNorm(ratio=0.3), np.empty(3, np.uint32)
    >>> for step in range(4):
    ...     compressor.positions(10, Context(step=step), out)
    ...     print(out.tolist())  # of 0 to 2, of 3 to 5 and of 6 to 9
    [1, 3, 6]
    [2, 4, 7]
    [0, 5, 8]
    [1, 3, 9]
    """

    id: ClassVar[str] = "globalrandk-maxnorm"
    paper: ClassVar[str] = (
        "GlobalRandK-MaxNorm, arXiv 2109.12497; an element of each of k parts in turns in place of a stored "
        "permutation, what is not sent is zero on all ranks, error feedback"
    )

    ratio: float = 0.1
    bits: int | Sequence[int] = 8
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.id, "rounding", self.rounding, ("nearest", "stochastic"))
        self._set(bits=check_bits(self.id, self.bits))
        if self.wire is not None:
            raise ConfigurationError(
                f"{self.id}: wire must be None, since bits set the format of values, got {self.wire!r}"
            )

    @property
    def feedback(self) -> bool:
        return self.values.feedback

    @property
    def contractive(self) -> bool:
        return self.values.contractive

    @property
    def contractive_variant(self) -> Compressor:
        return replace(self, rounding="nearest")

    @property
    def values(self) -> MaxNorm:
        return MaxNorm(bits=self.bits, rounding=self.rounding)

    def wire_bytes_per_element(self, itemsize: int) -> float:
        return self.count(1 << 20) / (1 << 20) * self.values.wire_bytes_per_element(itemsize)

    def positions(self, numel: int, context: Context, out: NDArray[np.uint32]) -> None:
        # The same draws in each step: the turn alone moves on.
        random = Context(bucket=context.bucket, seed=context.seed).random(shared=True)
        one_of_each(numel, random, context, out, turn=context.step)
