"""The sign of every element, and a mean magnitude for each block or layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.base_compressor import BucketParameters
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import CACHED, Bytes, Floats, Quantiser, sum_numbers
from mpicomp.compressors.wire_format import SIGNS
from mpicomp.errors import ConfigurationError
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_multiple, is_integer

_MOST_BITS = 4


@register
@dataclass(frozen=True, repr=False)
class OneBit(Quantiser):
    """One bit an element, its sign, and the mean magnitude of each block of elements, or of each layer of a model.

    ::

        left = x.copy()
        for _ in range(bits):
            for start in range(0, x.size, block):
                v = left[start : start + block]
                v -= np.mean(abs(v)) * np.copysign(1, v)
        sent = x - left

    Of all magnitudes the mean loses the least energy, and never more than there is, so error feedback contracts.

    Parameters
    ----------
    block : int or None
        Elements that share a magnitude, a multiple of 64. Short blocks follow the layers of a network, whose gradients
        differ in size; at 1024 the magnitudes add 3 % to the bytes. None is EF-SignSGD: one magnitude for each layer.
    bits : int
        From 1 to 4: each further bit is the sign of what the bits before it leave, with magnitudes of its own. Two bits
        leave less than half of the energy that one does.

    Notes
    -----
    For each bit the message has words of 64 signs, followed by the magnitudes as float32, padded to 8 bytes.

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

    gpu_sources: ClassVar[Sequence[str]] = ("signs", "message")

    block: int | None = 1024
    bits: int = 1

    def __post_init__(self) -> None:
        if not is_integer(self.bits) or not 1 <= self.bits <= _MOST_BITS:
            raise ConfigurationError(f"onebit: bits must be a whole number from 1 to {_MOST_BITS}, got {self.bits!r}")
        if self.block is not None:
            self._set(block=check_multiple("onebit", "block", self.block, SIGNS))

    def bind_to(self, bucket: BucketParameters) -> Self:
        if self.block is not None:
            return self
        return replace(self, parts=tuple((size, OneBit(block=None, bits=self.bits)) for size in bucket.sizes))

    @property
    def packs_in_place(self) -> bool:
        return self.bits == 1

    def packed_bytes(self, numel: int) -> int:
        blocks = -(-numel // self._block_of(numel))
        return self.bits * 8 * (-(-numel // SIGNS) + -(-blocks // 2))

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        block, planes = self._block_of(array.size), self._planes_to_fill(message, array.size)
        if self.bits == 1:
            [(words, scales)] = planes
            return kernels.pack_signs(array, block, scales, words, sent)
        sent[:] = array
        lost = [kernels.pack_signs_in_place(sent, block, scales, words) for words, scales in planes]
        self.unpack(message, sent)
        return lost[-1]

    def pack_in_place(self, accumulated: GradientWithResidual, place: slice, message: Bytes, key: int) -> float:
        numel = place.stop - place.start
        [(words, scales)] = self._planes_to_fill(message, numel)
        block = self._block_of(numel)
        fused = getattr(accumulated.kernels, "accumulate_signs", None)
        if fused is not None and numel == accumulated.numel and not accumulated.is_computed:
            lost: float = accumulated.fused_pieces(lambda *arrays: fused(*arrays, block, scales, words)).lost
            return lost
        # On the host summed and packed in turns, so that a sum is packed while it is in the second-level cache.
        step = max(1, CACHED // block) * block if accumulated.kernels is cpu else max(1, numel)
        losses: list[float] = []
        for start in range(0, numel, step):
            array = accumulated.part(place.start + start, min(place.start + start + step, place.stop))
            blocks = slice(start // block, -(-(start + array.size) // block))
            losses.append(kernels.pack_signs_in_place(array, block, scales[blocks], words[start // SIGNS :]))
        return sum_numbers(losses)

    def unpack(self, message: Bytes, out: Floats) -> None:
        self.check_length(message, out.size)
        block, ((words, scales), *planes) = self._block_of(out.size), self._planes(message, 0, out.size)
        kernels.unpack_signs(scales, words, block, out)
        for words, scales in planes:
            kernels.unpack_signs_add(scales.reshape(1, -1), words.reshape(1, -1), block, 1.0, out)

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        self.check_length(message, out.size)
        self.unpack_add_all(message.reshape(1, -1), slice(0, message.size), factor, out)

    def unpack_add_all(self, messages: Bytes, place: slice, factor: float, out: Floats) -> None:
        for words, scales in self._planes(messages, place.start, out.size):
            kernels.unpack_signs_add(scales, words, self._block_of(out.size), factor, out)

    def unpack_sum(self, messages: Bytes, place: slice, factor: float, out: Floats) -> None:
        for plane, (words, scales) in enumerate(self._planes(messages, place.start, out.size)):
            kernels.unpack_signs_add(scales, words, self._block_of(out.size), factor, out, plane == 0)

    def _block_of(self, numel: int) -> int:
        return self.block or max(1, -(-numel // SIGNS)) * SIGNS

    def _planes_to_fill(self, message: Bytes, numel: int) -> list[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
        """Return the planes of a message, whose padding becomes zero."""
        self.check_length(message, numel)
        for end in range(message.size, 0, -message.size // self.bits or -1):
            message[end - 8 : end] = 0
        return self._planes(message, 0, numel)

    def _planes(self, messages: Bytes, start: int, numel: int) -> list[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
        """Return, for each bit, the words of signs and the magnitudes of a message, or of each row of messages."""
        count, blocks = -(-numel // SIGNS), -(-numel // self._block_of(numel))
        size, words, scales = self.packed_bytes(numel) // self.bits, messages.view(np.uint64), messages.view(np.float32)
        planes = []
        for first in (start + bit * size for bit in range(self.bits)):
            middle = first // 4 + 2 * count
            planes.append((words[..., first // 8 :][..., :count], scales[..., middle : middle + blocks]))
        return planes
