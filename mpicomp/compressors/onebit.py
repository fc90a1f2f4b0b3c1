"""The sign of every element, and a mean magnitude for each block or layer."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.base_compressor import BucketParameters
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Bytes, Floats, Quantiser
from mpicomp.compressors.wire_format import SIGNS
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_multiple

_CACHED = 1 << 16  # elements that, with their gradient and residual, stay in the second-level cache


@register
@dataclass(frozen=True, repr=False)
class OneBit(Quantiser):
    """One bit an element, its sign, and the mean magnitude of each block of elements, or of each layer of a model.

    ::

        for start in range(0, x.size, block):
            v = x[start : start + block]
            sent[start : start + block] = np.mean(abs(v)) * np.copysign(1, v)

    Of all magnitudes the mean loses the least energy, and never more than there is, so error feedback contracts.

    Parameters
    ----------
    block : int or None
        Elements that share a magnitude, a multiple of 64. Short blocks follow the layers of a network, whose gradients
        differ in size; at 1024 the magnitudes add 3 % to the bytes. None is EF-SignSGD: one magnitude for each layer.

    Notes
    -----
    The message has words of 64 signs, followed by the magnitudes as float32, padded to 8 bytes.

    A zero travels as the magnitude of its block, by its sign bit; a block of zeros stays zeros. A magnitude of float64
    elements beyond float32 travels as the largest float32; the rest waits in the residual.

    With ``block=None`` an array that is no bucket of a model counts as one layer, and in two phases a layer has a
    magnitude in every rank's part of a bucket that it reaches into. The lost energy of n elements is
    ``norm2(x) - norm1(x)**2 / n``: where few elements are large it contracts slowly. The paper applies the learning
    rate before the memory; here the residual is one of gradients, so an element that waits is applied at the learning
    rate of the step that sends it.

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
        "EF-SignSGD, Karimireddy et al. 2019, arXiv 1901.09847, after 1-bit SGD, Seide et al. 2014; a magnitude for "
        "every block or layer, and the learning rate is not in the memory"
    )
    packs_in_place: ClassVar[bool] = True

    block: int | None = 1024

    def __post_init__(self) -> None:
        if self.block is not None:
            self._set(block=check_multiple("onebit", "block", self.block, SIGNS))

    def bind_to(self, bucket: BucketParameters) -> Self:
        if self.block is not None:
            return self
        return replace(self, parts=tuple((size, OneBit(block=None)) for size in bucket.sizes))

    def packed_bytes(self, numel: int) -> int:
        blocks = -(-numel // self._block_of(numel))
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
        block = self._block_of(out.size)
        end, blocks = place.start + 8 * -(-out.size // SIGNS), -(-out.size // block)
        if len(messages):
            self.check_length(messages[0][place], out.size)
        words = messages.view(np.uint64)[:, place.start // 8 : end // 8]
        scales = messages.view(np.float32)[:, end // 4 : end // 4 + blocks]
        kernels.unpack_signs_add(scales, words, block, factor, out)

    def _block_of(self, numel: int) -> int:
        return self.block or max(1, -(-numel // SIGNS)) * SIGNS

    def _parts(self, message: Bytes, numel: int) -> tuple[NDArray[np.uint64], NDArray[np.float32], int]:
        """Return a message's words of signs, the magnitudes after them, and the elements of each."""
        self.check_length(message, numel)
        end, block = 8 * -(-numel // SIGNS), self._block_of(numel)
        return message[:end].view(np.uint64), message[end:].view(np.float32)[: -(-numel // block)], block
