"""The sign of every element, with a mean magnitude for each block or layer, or as a vote."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import BucketParameters
from mpicomp.compressors.kinds import CACHED_NUMEL, Bytes, Floats, Quantiser, sum_numbers
from mpicomp.compressors.wire import SIGNS
from mpicomp.errors import ConfigurationError
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_multiple, is_integer, is_number

_MAX_BITS = 4
_MAX_SCALE = float(np.finfo(np.float32).max)


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
        Elements that share a magnitude, a multiple of 64; at 1024 the magnitudes add 3 % to the bytes. None is
        EF-SignSGD: one magnitude for each layer.
    bits : int
        From 1 to 4: each further bit is the sign of the error of those before, with magnitudes of its own. Two bits
        lose less than half of the energy that one does.

    Notes
    -----
    For each bit the message has words of 64 signs, followed by the magnitudes as float32, padded to 8 bytes. A zero
    travels as the magnitude of its block, by its sign bit; a block of zeros stays zeros. A magnitude beyond float32
    travels as the largest float32; the rest waits in the residual.

    With ``block=None`` a layer has a magnitude in every rank's part of a bucket, in two phases. The lost energy of n
    elements is ``norm2(x) - norm1(x)**2 / n``: where few elements are large it contracts slowly. The paper applies the
    learning rate before the memory; here an element that waits is applied at that of the step that sends it.
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
        if not is_integer(self.bits) or not 1 <= self.bits <= _MAX_BITS:
            raise ConfigurationError(f"onebit: bits must be a whole number from 1 to {_MAX_BITS}, got {self.bits!r}")
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

    def pack_in_place(self, accumulated: Accumulated, place: slice, message: Bytes, key: int) -> float:
        numel = place.stop - place.start
        [(words, scales)] = self._planes_to_fill(message, numel)
        block = self._block_of(numel)
        fused = getattr(accumulated.kernels, "accumulate_signs", None)
        if fused is not None and numel == accumulated.numel and not accumulated.is_computed:
            lost: float = accumulated.fused(lambda *arrays: fused(*arrays, block, scales, words), gathers=True).lost
            return lost
        # On the host summed and packed in turns, so that a sum is packed while it is in the second-level cache.
        step = max(1, CACHED_NUMEL // block) * block if accumulated.kernels is cpu else max(1, numel)
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
        # Their padding becomes zero.
        self.check_length(message, numel)
        for end in range(message.size, 0, -message.size // self.bits or -1):
            message[end - 8 : end] = 0
        return self._planes(message, 0, numel)

    def _planes(self, messages: Bytes, start: int, numel: int) -> list[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
        # For each bit the words of signs and the magnitudes, of a message or of each row of messages.
        count, blocks = -(-numel // SIGNS), -(-numel // self._block_of(numel))
        size, words, scales = self.packed_bytes(numel) // self.bits, messages.view(np.uint64), messages.view(np.float32)
        planes = []
        for first in (start + bit * size for bit in range(self.bits)):
            middle = first // 4 + 2 * count
            planes.append((words[..., first // 8 :][..., :count], scales[..., middle : middle + blocks]))
        return planes


_SIGNS_OF_ARRAY = OneBit(block=None)


@register
@dataclass(frozen=True, repr=False)
class SignSGD(Quantiser):
    """signSGD with majority vote (arXiv 1810.05291): each rank votes with its signs, the winning sign is delivered.

    ::

        votes = sum(np.where(np.signbit(x), -1, 1) for x in ranks)
        sent = scale * np.where(votes >= 0, 1, -1)

    Parameters
    ----------
    scale : float
        ``scale`` or ``-scale`` is delivered, whatever the size of the gradients.

    Notes
    -----
    Every element moves by the same amount in every step: start from the learning rate of Adam, 0.001 or less, or set
    ``scale`` to a typical magnitude of a gradient. Elements that are always zero move too: a zero counts as plus, as
    does a tie; a negative zero counts as minus. There is no error feedback, since magnitudes do not travel.
    """

    id: ClassVar[str] = "signsgd"
    averages: ClassVar[bool] = False
    paper: ClassVar[str] = (
        "signSGD with majority vote, Bernstein et al. 2018, arXiv 1802.04434 and 1810.05291; every rank counts in "
        "place of a server, momentum is left to the optimizer, a tie is plus"
    )

    scale: float = 1.0

    feedback = False  # without magnitudes the sent part of an element is unknown
    can_fall_back_to_dense = False  # signs have one size, whatever that of gradients
    contractive = False  # delivered values may be many times as large as the gradient

    def __post_init__(self) -> None:
        if not is_number(self.scale) or not 0 < self.scale <= _MAX_SCALE:
            raise ConfigurationError(
                f"signsgd: scale must be a positive number, got {self.scale!r}; at most {_MAX_SCALE!r}, as a float32"
            )
        self._set(scale=float(self.scale))

    def packed_bytes(self, numel: int) -> int:
        return _SIGNS_OF_ARRAY.packed_bytes(numel)

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        _SIGNS_OF_ARRAY.pack(array, message, sent, key)
        magnitude = message[-8:].view(np.float32)[:1]
        with np.errstate(invalid="ignore", over="ignore"):
            magnitude[:] = magnitude * 0 + 1  # NaN and infinity become NaN
            self.unpack(message, sent)
            lost: float = kernels.energy(array - sent)
        return lost

    def unpack(self, message: Bytes, out: Floats) -> None:
        out.fill(0)
        self.unpack_add(message, 1.0, out)

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        _SIGNS_OF_ARRAY.unpack_add(message, factor * self.scale, out)

    def unpack_sum(self, messages: Bytes, place: slice, factor: float, out: Floats) -> None:
        _SIGNS_OF_ARRAY.unpack_sum(messages, place, 1.0, out)
        np.copysign(out.dtype.type(self.scale), out, out=out)
