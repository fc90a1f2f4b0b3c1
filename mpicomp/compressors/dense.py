"""Every element, in full or in 16 bits."""

from dataclasses import dataclass
from typing import ClassVar

from mpicomp.compressors.base_compressor import Compressor
from mpicomp.errors import ConfigurationError
from mpicomp.registry import register


@register
@dataclass(frozen=True)
class Dense(Compressor):
    """No compression, or 16-bit numbers on the wire.

    ::

        sent = x if wire is None else x.astype(np.float16)

    Parameters
    ----------
    wire : {None, "fp16", "bf16"}
        None sends 32-bit numbers (64 for float64 gradients). The 16-bit forms are rounded at the sender, summed in at
        least float32 by the owner of each part, and rounded once more; both errors stay in residuals.

    Examples
    --------
    >>> Dense().feedback, Dense(wire="bf16").feedback
    (False, True)
    """

    id: ClassVar[str] = "dense"
    family: ClassVar[str] = "dense"
    message: ClassVar[str] = "dense"
    paper: ClassVar[str] = "none: the baseline of all others"

    wire: str | None = None

    def __post_init__(self) -> None:
        if self.wire not in (None, "fp16", "bf16"):
            raise ConfigurationError(f"dense: wire must be None, 'fp16' or 'bf16', got {self.wire!r}")

    @property
    def feedback(self) -> bool:  # the residual keeps the rounding errors of 16-bit numbers
        return self.wire is not None

    def wire_bytes_per_element(self, itemsize: int) -> float:
        return itemsize if self.wire is None else 2
