"""Signs alone, of which the majority of ranks decides."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicomp.compressors.base import Compressor
from mpicomp.compressors.registry import register_compressor
from mpicomp.errors import ConfigurationError

_LARGEST = float(np.finfo(np.float32).max)


@register_compressor
@dataclass(frozen=True, repr=False)
class SignSGD(Compressor):
    """signSGD with majority vote (arXiv 1810.05291): each rank votes with its signs, the sign that wins is delivered.

    Parameters
    ----------
    scale : float
        What is delivered is ``scale`` or ``-scale``, whatever the size of the gradients.

    Notes
    -----
    Every element moves by the same amount in every step, so the learning rate has to be far smaller than it is for
    gradients: start from that of Adam, 0.001 or less, or set ``scale`` to a typical magnitude of a gradient. Those that
    are always zero move too: a zero counts as plus, as does a tie. A negative zero counts as minus, by its sign bit.

    There is no error feedback: magnitudes do not travel, so what was not sent cannot be told. `EFSign` and `OneBit`
    send a magnitude with the signs, and have it.

    Examples
    --------
    >>> SignSGD().feedback, SignSGD().wire_bytes_per_element(4)
    (False, 0.125)
    """

    id: ClassVar[str] = "signsgd"
    family: ClassVar[str] = "quantiser"
    message: ClassVar[str] = "votes"
    paper: ClassVar[str] = (
        "signSGD with majority vote, Bernstein et al. 2018, arXiv 1802.04434 and 1810.05291; momentum is left to the "
        "optimizer, a tie is plus"
    )

    scale: float = 1.0

    def __post_init__(self) -> None:
        number = isinstance(self.scale, (int, float, np.integer, np.floating)) and not isinstance(self.scale, bool)
        if not number or not 0 < self.scale <= _LARGEST:
            raise ConfigurationError(
                f"signsgd: scale must be a positive number, got {self.scale!r}; at most {_LARGEST!r}, as a float32"
            )
        object.__setattr__(self, "scale", float(self.scale))

    @property
    def feedback(self) -> bool:
        """Off: without magnitudes it cannot be told what was sent of an element."""
        return False

    @property
    def replaceable(self) -> bool:
        """No: it delivers signs of one size, whatever that of gradients."""
        return False

    @property
    def contractive(self) -> bool:
        """No: what is delivered may be many times what there was."""
        return False

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Give a bit."""
        return 1 / 8
