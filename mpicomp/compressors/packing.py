"""Packing of a bucket whose parts have different quantisers, whole or in the pieces of owners."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.kinds import Quantiser

_MOST = (1 << 64) - 1  # of a key


class Packer:
    """Packs one piece of a bucket, part by part; what it does is what a `Quantiser` does with an array.

    Parameters
    ----------
    parts : sequence of (int, Quantiser)
        Elements and quantiser of each part of the piece, in order.
    """

    def __init__(self, parts: Sequence[tuple[int, Quantiser]]) -> None:
        self._parts = [(size, quantiser, quantiser.packed_bytes(size)) for size, quantiser in parts]
        self.packed_bytes = sum(nbytes for _, _, nbytes in self._parts)
        """Length of the message."""

    def pack(
        self, array: NDArray[np.floating], message: NDArray[np.uint8], sent: NDArray[np.floating], key: int
    ) -> float:
        """Pack the piece; see `Quantiser.pack`."""
        lost, start, place = 0.0, 0, 0
        for number, (size, quantiser, nbytes) in enumerate(self._parts):
            part = slice(start, start + size)
            lost += quantiser.pack(array[part], message[place : place + nbytes], sent[part], key + number & _MOST)
            start, place = start + size, place + nbytes
        return lost

    def unpack(self, message: NDArray[np.uint8], out: NDArray[np.floating]) -> None:
        """Write the packed values; see `Quantiser.unpack`."""
        start, place = 0, 0
        for size, quantiser, nbytes in self._parts:
            quantiser.unpack(message[place : place + nbytes], out[start : start + size])
            start, place = start + size, place + nbytes

    def unpack_add(self, message: NDArray[np.uint8], factor: float, out: NDArray[np.floating]) -> None:
        """Add ``factor`` times the packed values; see `Quantiser.unpack_add`."""
        start, place = 0, 0
        for size, quantiser, nbytes in self._parts:
            quantiser.unpack_add(message[place : place + nbytes], factor, out[start : start + size])
            start, place = start + size, place + nbytes


def packers(compressor: Quantiser, sizes: Sequence[int]) -> list[Packer]:
    """Return what packs each piece of an array.

    Parameters
    ----------
    compressor : Quantiser
        Where it is bound to a bucket of as many elements as the array has, its parts are packed separately.
    sizes : sequence of int
        Elements of each piece, in order.
    """
    if sum(size for size, _ in compressor.parts) != sum(sizes):
        known = {size: Packer([(size, compressor)]) for size in set(sizes)}
        return [known[size] for size in sizes]
    left = list(reversed(compressor.parts))
    made = []
    for size in sizes:
        inside: list[tuple[int, Quantiser]] = []
        while size:
            whole, quantiser = left.pop()
            taken = min(size, whole)
            if taken:
                inside.append((taken, quantiser))
            if taken < whole:
                left.append((whole - taken, quantiser))
            size -= taken
        made.append(Packer(inside))
    return made
