"""The sign of every element, and a mean magnitude for each block."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Bytes, Floats, Quantiser
from mpicomp.compressors.wire_format import SIGNS
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_multiple

_CACHED = 1 << 16  # elements that, with their gradient and residual, stay in the second-level cache


@dataclass(frozen=True, repr=False)
class SignQuantiser(Quantiser):
    """Words of 64 signs, followed by a float32 magnitude for each block of elements, padded to 8 bytes."""

    packs_in_place: ClassVar[bool] = True

    @abstractmethod
    def block_of(self, numel: int) -> int:
        """Return the number of elements that share a magnitude, a multiple of 64."""

    def packed_bytes(self, numel: int) -> int:
        blocks = -(-numel // self.block_of(numel))
        return 8 * (-(-numel // SIGNS) + -(-blocks // 2))

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        message[-8:] = 0  # padding
        words, scales, block = self._parts(message, array.size)
        return kernels.pack_signs(array, block, scales, words, sent)

    def pack_in_place(self, accumulated: GradientWithResidual, place: slice, message: Bytes, key: int) -> float:
        message[-8:] = 0  # padding
        numel = place.stop - place.start
        words, scales, block = self._parts(message, numel)
        # On the host summed and packed in turns, so that a sum is packed while it is in the second-level cache.
        step = max(1, _CACHED // block) * block if accumulated.kernels is cpu else max(1, numel)
        lost = 0.0
        for start in range(0, numel, step):
            array = accumulated.part(place.start + start, min(place.start + start + step, place.stop))
            blocks = slice(start // block, -(-(start + array.size) // block))
            lost += kernels.pack_signs_in_place(array, block, scales[blocks], words[start // SIGNS :])
        return lost

    def unpack(self, message: Bytes, out: Floats) -> None:
        words, scales, block = self._parts(message, out.size)
        kernels.unpack_signs(scales, words, block, out)

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        self.unpack_add_all(message.reshape(1, -1), slice(0, message.size), factor, out)

    def unpack_add_all(self, messages: Bytes, place: slice, factor: float, out: Floats) -> None:
        block = self.block_of(out.size)
        end, blocks = place.start + 8 * -(-out.size // SIGNS), -(-out.size // block)
        if len(messages):
            self.check_length(messages[0][place], out.size)
        words = messages.view(np.uint64)[:, place.start // 8 : end // 8]
        scales = messages.view(np.float32)[:, end // 4 : end // 4 + blocks]
        kernels.unpack_signs_add(scales, words, block, factor, out)

    def _parts(self, message: Bytes, numel: int) -> tuple[NDArray[np.uint64], NDArray[np.float32], int]:
        """Return a message's words of signs, the magnitudes after them, and the elements of each."""
        self.check_length(message, numel)
        end, block = 8 * -(-numel // SIGNS), self.block_of(numel)
        return message[:end].view(np.uint64), message[end:].view(np.float32)[: -(-numel // block)], block


@register
@dataclass(frozen=True, repr=False)
class OneBit(SignQuantiser):
    """One bit an element, its sign, and one float32 a block: the mean magnitude.

    ::

        for start in range(0, x.size, block):
            v = x[start : start + block]
            sent[start : start + block] = np.mean(abs(v)) * np.copysign(1, v)

    Of all magnitudes the mean loses the least energy, and never more than there is, so error feedback contracts.

    Parameters
    ----------
    block : int
        Elements that share a magnitude, a multiple of 64. Short blocks follow the layers of a network, whose gradients
        differ in size; at 1024 the magnitudes add 3 % to the bytes.

    Notes
    -----
    A zero travels as the magnitude of its block, by its sign bit; a block of zeros stays zeros. A magnitude of float64
    elements beyond float32 travels as the largest float32; the rest waits in the residual.

    Examples
    --------
    >>> import numpy as np
    >>> compressor, array = OneBit(), np.array([1, -3, 2], np.float32)
    >>> message, sent = np.empty(compressor.packed_bytes(3), np.uint8), np.empty(3, np.float32)
    >>> compressor.pack(array, message, sent, key=0), sent.tolist()
    (2.0, [2.0, -2.0, 2.0])
    """

    id: ClassVar[str] = "onebit"
    paper: ClassVar[str] = (
        "scaled sign, Karimireddy et al. 2019, arXiv 1901.09847, after 1-bit SGD, Seide et al. 2014; a magnitude for "
        "every block"
    )

    block: int = 1024

    def __post_init__(self) -> None:
        self._set(block=check_multiple("onebit", "block", self.block, SIGNS))

    def block_of(self, numel: int) -> int:
        return self.block
