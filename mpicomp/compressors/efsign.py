"""The sign of every element, and one mean magnitude for each layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.kinds import Quantiser
from mpicomp.registry import register

_WORD = 64  # signs in a word


@register
@dataclass(frozen=True, repr=False)
class EFSign(Quantiser):
    """Scaled sign: one bit an element, and the mean magnitude of each layer of a model.

    ::

        sent = np.mean(abs(x)) * np.copysign(1, x)

    Of an array that is no bucket of a model there is one. It loses ``norm2(x) - norm1(x)**2 / n`` of an array x of n
    elements, always less than there is, so that error feedback contracts; where few elements are large it contracts
    slowly. `mpicomp.OneBit` has magnitudes for short blocks, which also follow what differs within a layer.

    Notes
    -----
    In two phases a layer has a magnitude in every rank's part of a bucket that it reaches into. A zero travels as the
    mean, by its sign bit.

    The paper keeps the learning rate inside the memory; here the residual is one of gradients, so that what waits in it
    is later taken at the learning rate of that step.

    Examples
    --------
    >>> import numpy as np
    >>> compressor, array = EFSign(), np.array([1, -3, 2], np.float32)
    >>> message, sent = np.empty(compressor.packed_bytes(3), np.uint8), np.empty(3, np.float32)
    >>> compressor.pack(array, message, sent, key=0), sent.tolist()
    (2.0, [2.0, -2.0, 2.0])
    """

    id: ClassVar[str] = "efsign"
    paper: ClassVar[str] = (
        "EF-SignSGD, Karimireddy et al. 2019, arXiv 1901.09847; in two phases one magnitude for a layer in each "
        "rank's part of a bucket, and the learning rate is not in the memory"
    )

    def bind(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]] = (),
        *,
        model: Mapping[str, int] | None = None,
        warm_up: bool = True,
    ) -> "EFSign":
        return replace(self, parts=tuple((size, EFSign()) for size in sizes))

    def packed_bytes(self, numel: int) -> int:
        return 8 * (-(-numel // _WORD) + (numel > 0))

    def pack(
        self, array: NDArray[np.floating], message: NDArray[np.uint8], sent: NDArray[np.floating], key: int
    ) -> float:
        message[-8:] = 0  # padding
        words, scales = self._parts(message, array.size)
        return kernels.pack_signs(array, _block(array.size), scales, words, sent)

    def unpack(self, message: NDArray[np.uint8], out: NDArray[np.floating]) -> None:
        words, scales = self._parts(message, out.size)
        kernels.unpack_signs(scales, words, _block(out.size), out)

    def unpack_add(self, message: NDArray[np.uint8], factor: float, out: NDArray[np.floating]) -> None:
        words, scales = self._parts(message, out.size)
        kernels.unpack_signs_add(scales, words, _block(out.size), factor, out)

    def _parts(self, message: NDArray[np.uint8], numel: int) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return a message's words of signs, and the magnitude after them."""
        self.check_length(message, numel)
        end = 8 * -(-numel // _WORD)
        return message[:end].view(np.uint64), message[end:].view(np.float32)[: min(numel, 1)]


def _block(numel: int) -> int:
    """Return the length of a block that holds all elements."""
    return max(1, -(-numel // _WORD)) * _WORD
