"""Natural compression: the sign and a power of two, without the mantissa."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.kinds import Bytes, Floats, Quantiser
from mpicomp.compressors.wire_format import SIGNS
from mpicomp.registry import register


@register
@dataclass(frozen=True, repr=False)
class Natural(Quantiser):
    """Every magnitude is rounded at random to one of its two neighboring powers of two, without bias.

    ::

        low = 2.0 ** np.floor(np.log2(abs(x)))
        up = random(x.size) < abs(x) / low - 1
        sent = np.copysign(np.where(up, 2 * low, low), x)

    An element takes nine bits, its sign and its exponent, and no scale, so elements may differ in size. The expected
    lost energy is at most an eighth: error feedback contracts, and is off by default as the mean is unbiased.

    Notes
    -----
    Random bits are added to the mantissa of a float32 and carry into its exponent: exactly unbiased, down to the least
    subnormal number. Elements beyond 2**127 become that. float64 elements are rounded to the nearest float32 first.

    Examples
    --------
    >>> import numpy as np
    >>> compressor, array = Natural(), np.array([0.25, -4, 0], np.float32)
    >>> message, sent = np.empty(compressor.packed_bytes(3), np.uint8), np.empty(3, np.float32)
    >>> compressor.pack(array, message, sent, key=0), sent.tolist()
    (0.0, [0.25, -4.0, 0.0])
    """

    id: ClassVar[str] = "natural"
    paper: ClassVar[str] = "natural compression, Horvath et al. 2019, arXiv 1905.10988; beyond 2**127 it saturates"

    feedback = False  # unbiased without it
    unbiased = True

    def packed_bytes(self, numel: int) -> int:
        return 8 * (-(-numel // SIGNS) + -(-numel // 8))

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        message[-8:] = 0  # padding
        words, exponents = self._parts(message, array.size)
        return kernels.pack_exponents(array, words, exponents, sent, key)

    def unpack(self, message: Bytes, out: Floats) -> None:
        words, exponents = self._parts(message, out.size)
        kernels.unpack_exponents(words, exponents, out)

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        words, exponents = self._parts(message, out.size)
        kernels.unpack_exponents_add(words, exponents, factor, out)

    def _parts(self, message: Bytes, numel: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return a message's words of signs, and the exponents after them."""
        self.check_length(message, numel)
        end = 8 * -(-numel // SIGNS)
        return message[:end].view(np.uint64), message[end : end + numel]
