"""TernGrad: minus one, zero or one times a scale that all ranks share."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.kinds import SharedQuantiser
from mpicomp.compressors.maxnorm import largest
from mpicomp.device import to_python
from mpicomp.errors import ConfigurationError
from mpicomp.registry import register
from mpicomp.setting_checks import is_number


@register
@dataclass(frozen=True, repr=False)
class TernGrad(SharedQuantiser):
    """TernGrad (arXiv 1705.07878): an element is sent as w with its sign, with probability ``|x| / w``, or as zero.

    ::

        w = max(min(abs(x).max(), clip * np.sqrt(np.mean(x**2))) for x in ranks)
        chosen = random(x.size) < abs(x) / w
        sent = np.where(chosen, np.copysign(w, x), 0)

    Parameters
    ----------
    clip : float or None
        w is the maximum over ranks of the smaller of two numbers: a rank's largest magnitude, and ``clip`` times its
        root mean square; larger elements are clipped to w. Without clipping (None) w follows the largest of all
        elements, nearly all others are sent as zero, and the mean over draws is the gradient.

    Notes
    -----
    Not for error feedback: the error of an element can be many times the element.

    Different from the paper:

    - elements are clipped at the scale that ranks share, not at that of each rank, so fewer of them are;
    - the mean square is taken about zero, not about the mean. Gradients have a mean near zero, where it is the same;
      but the standard deviation of equal elements, or of a single one, is zero, and would clip all of them to nothing;
    - a bucket has one scale, not each of its layers.

    Examples
    --------
    >>> TernGrad().unbiased, TernGrad(clip=None).unbiased, TernGrad().feedback
    (False, True, False)
    """

    id: ClassVar[str] = "terngrad"
    paper: ClassVar[str] = (
        "TernGrad with scaler sharing, Wen et al. 2017, arXiv 1705.07878; clipped at the shared scale, at 2.5 times "
        "the root mean square, one scale a bucket"
    )

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        if self.clip is not None:
            if not is_number(self.clip) or not 0 < self.clip < math.inf:
                raise ConfigurationError(f"terngrad: clip must be None or a positive number, got {self.clip!r}")
            self._set(clip=float(self.clip))

    @property
    def scales(self) -> tuple[int, ...]:
        return (1,)

    stochastic = True

    @property
    def unbiased(self) -> bool:
        return self.clip is None

    def reach(self, array: NDArray[np.floating]) -> float:
        most = largest(array)
        if self.clip is None or not most > 0 or not math.isfinite(most):
            return most
        [energy] = to_python(kernels.energy(array))
        typical = math.sqrt(energy / array.size)
        return min(most, self.clip * typical) if typical > 0 else most  # zero where squares vanish
