"""Natural compression: the sign and a power of two, without the mantissa."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.kinds import Quantiser
from mpicomp.registry import register

_WORD = 64  # signs in a word


@register
@dataclass(frozen=True, repr=False)
class Natural(Quantiser):
    """Every magnitude is rounded at random to one of its two neighboring powers of two, without bias.

    ::

        low = 2.0 ** np.floor(np.log2(abs(x)))
        up = random(x.size) < abs(x) / low - 1
        sent = np.copysign(np.where(up, 2 * low, low), x)

    An element takes nine bits, its sign and its exponent, and no scale: elements of any size stand side by side. It is
    off by an eighth of its energy in expectation at most, so that error feedback contracts; being unbiased it runs
    without if nothing else is said.

    Notes
    -----
    Random bits are added to the mantissa of a float32 and carry into its exponent: exactly unbiased, down to the least
    subnormal number. Elements beyond 2**127, the largest power of two, become that. float64 elements are taken to the
    nearest float32 first.

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

    @property
    def feedback(self) -> bool:
        # Unbiased without it
        return False

    @property
    def unbiased(self) -> bool:
        return True

    def packed_bytes(self, numel: int) -> int:
        return 8 * (-(-numel // _WORD) + -(-numel // 8))

    def pack(
        self, array: NDArray[np.floating], message: NDArray[np.uint8], sent: NDArray[np.floating], key: int
    ) -> float:
        message[-8:] = 0  # padding
        words, exponents = self._parts(message, array.size)
        return kernels.pack_exponents(array, words, exponents, sent, key)

    def unpack(self, message: NDArray[np.uint8], out: NDArray[np.floating]) -> None:
        words, exponents = self._parts(message, out.size)
        kernels.unpack_exponents(words, exponents, out)

    def unpack_add(self, message: NDArray[np.uint8], factor: float, out: NDArray[np.floating]) -> None:
        words, exponents = self._parts(message, out.size)
        kernels.unpack_exponents_add(words, exponents, factor, out)

    def _parts(self, message: NDArray[np.uint8], numel: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return a message's words of signs, and the exponents after them."""
        self.check_length(message, numel)
        end = 8 * -(-numel // _WORD)
        return message[:end].view(np.uint64), message[end : end + numel]
