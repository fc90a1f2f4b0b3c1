"""Max-norm quantisers: a uniform grid that all ranks share, up to the largest element that any of them has."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.kinds import SharedQuantiser
from mpicomp.device import to_python
from mpicomp.errors import ConfigurationError
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, is_integer


@register
@dataclass(frozen=True, repr=False)
class MaxNorm(SharedQuantiser):
    """QSGD-MaxNorm (arXiv 2109.12497), with one, two or more scales.

    ::

        w, s = max(abs(x).max() for x in ranks), 2 ** (bits - 1) - 1
        levels = np.floor(x / w * s + random(x.size))  # integers, which ranks sum; + 0.5 with rounding="nearest"
        sent = levels * w / s

    Every element is rounded to one of ``2 s + 1`` points from ``-w`` to ``w``, where w is the largest norm of any rank.
    Integers of all ranks are summed as they travel.

    Parameters
    ----------
    bits : int, or sequence of int
        From 2 to 16, sign included. Several, ascending, are one grid each: the first sets the width of integers, and
        an element goes on the finest grid on which it fits into that width on every rank. ``[6, 10]`` is the paper's
        two-scale form.
    norm : {"max", "l2"}
        w is the largest magnitude, or the L2 norm, which is far larger, so that few points are used.
    rounding : {"stochastic", "nearest"}
        At random, up or down, so that the mean over draws is the element; or to the nearest point, which loses less and
        runs with error feedback. ``"nearest"`` needs ``norm="max"``: with the L2 norm equal elements would all be
        below half a step, and never be sent.

    Notes
    -----
    The variance of a rank's error is at most ``(w / s)**2 / 4`` for each element, of the s of its grid. With
    ``"nearest"`` no error is larger than half a step, nor than its element, so the largest element of the residual is
    at most ``1 / (2 s - 1)`` of the gradients' largest.

    Different from the paper and its code:

    - bits count the sign, of which the paper's ``s = 2**bits - 1`` takes one more;
    - an integer on the wire takes the bits of its sum over ranks, not 8, 16 or 32, so that it never overflows;
    - elements are compared to a finer grid before they are rounded: afterwards is biased, as elements near its end
      would be sent only if they were rounded down.

    Examples
    --------
    >>> MaxNorm(bits=4).scales, MaxNorm(bits=[6, 10]).scales
    ((7,), (31, 511))
    >>> MaxNorm().feedback, MaxNorm(rounding="nearest").feedback
    (False, True)
    """

    id: ClassVar[str] = "maxnorm"
    paper: ClassVar[str] = (
        "QSGD-MaxNorm, two-scale and multi-scale, arXiv 2109.12497; bits count the sign, fields as wide as the sum "
        "needs, grids chosen before rounding; rounding to the nearest with error feedback"
    )

    bits: int | Sequence[int] = 4
    norm: str = "max"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        self._set(bits=check_bits(self.id, self.bits))
        check_choice(self.id, "norm", self.norm, ("max", "l2"))
        check_choice(self.id, "rounding", self.rounding, ("stochastic", "nearest"))
        if (self.rounding, self.norm) == ("nearest", "l2"):
            raise ConfigurationError(
                f"{self.id}: rounding='nearest' needs norm='max': with the L2 norm equal elements are never sent"
            )

    @property
    def scales(self) -> tuple[int, ...]:
        each = self.bits if isinstance(self.bits, Sequence) else (self.bits,)
        return tuple(2 ** (bits - 1) - 1 for bits in each)

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contractive_variant(self) -> Compressor:
        return replace(self, norm="max", rounding="nearest")

    def reach(self, array: NDArray[np.floating]) -> float:
        if self.norm == "max":
            return largest(array)
        [energy] = to_python(kernels.energy(array))
        if math.isinf(energy) and math.isfinite(top := largest(array)):  # squares of finite numbers overflow too
            [shrunk] = to_python(kernels.energy(array / top))
            return min(top * math.sqrt(shrunk), sys.float_info.max)
        return math.sqrt(energy)


def check_bits(subsystem: str, bits: object) -> int | tuple[int, ...]:
    """Return the bits of one grid as an int, of several as a tuple."""
    several = isinstance(bits, Sequence) and not isinstance(bits, str)
    given: list[Any] = list(bits) if several else [bits]  # type: ignore[call-overload]
    whole = all(map(is_integer, given))
    if not given or not whole or not all(2 <= number <= 16 for number in given):
        raise ConfigurationError(f"{subsystem}: bits must be a whole number from 2 to 16, or several, got {bits!r}")
    if sorted(set(given)) != given:
        raise ConfigurationError(f"{subsystem}: bits of several grids must ascend without repetition, got {bits!r}")
    return tuple(map(int, given)) if len(given) > 1 else int(given[0])


def largest(array: NDArray[np.floating]) -> float:
    """Return the largest magnitude: NaN if an element is, 0 without elements."""
    if array.size == 0:
        return 0.0
    most, least = to_python(array.max(), array.min())
    return max(float(most), -float(least))
