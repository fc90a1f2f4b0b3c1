"""A quantiser in one file: eight bits an element, and one scale for the whole bucket."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import mpicomp

SCALE_BYTES = 8


@mpicomp.register
@dataclass(frozen=True, repr=False)
class Int8(mpicomp.Quantiser):
    """The nearest of 255 multiples of the largest magnitude over 127; error feedback keeps the difference."""

    id: ClassVar[str] = "int8"
    paper: ClassVar[str] = "none"

    def packed_bytes(self, numel: int) -> int:
        """Return a multiple of 8, and 0 for an empty bucket."""
        return SCALE_BYTES + -(-numel // 8) * 8 if numel else 0

    def pack(self, array: NDArray[Any], message: NDArray[np.uint8], sent: NDArray[Any], key: int) -> float:
        """Write the message and what `unpack` makes of it; return the squared norm of what is lost."""
        if array.size == 0:
            return 0.0
        scale = np.abs(array).max().astype(np.float64) / 127
        message[:] = 0
        message[:SCALE_BYTES].view(np.float64)[:] = scale
        with np.errstate(invalid="ignore"):  # a scale that is NaN or infinite makes all of `sent` so
            levels = np.rint(array / scale) if scale > 0 else np.zeros_like(array)
            message[SCALE_BYTES : SCALE_BYTES + array.size].view(np.int8)[:] = np.nan_to_num(levels)
            self.unpack(message, sent)
            return float(np.square(array - sent, dtype=np.float64).sum())

    def unpack(self, message: NDArray[np.uint8], out: NDArray[Any]) -> None:
        """Write the values of a message."""
        self.check_length(message, out.size)
        if out.size:
            scale = message[:SCALE_BYTES].view(np.float64)[0]
            with np.errstate(invalid="ignore"):
                out[:] = scale * message[SCALE_BYTES : SCALE_BYTES + out.size].view(np.int8)

    def unpack_add(self, message: NDArray[np.uint8], factor: float, out: NDArray[Any]) -> None:
        """Add factor times the values of a message."""
        values = np.empty_like(out)
        self.unpack(message, values)
        out += factor * values
