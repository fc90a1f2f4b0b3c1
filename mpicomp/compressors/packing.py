"""Packing of a bucket whose parts have different quantisers, whole or in the pieces of owners."""

from collections.abc import Sequence

from mpicomp.compressors.kinds import Bytes, Floats, Quantiser

_MOST = (1 << 64) - 1  # of a key


class Packer:
    """Packs one piece of a bucket, whose parts (elements, quantiser) follow each other, as a `Quantiser` does."""

    def __init__(self, parts: Sequence[tuple[int, Quantiser]]) -> None:
        self._parts = [(size, quantiser, quantiser.packed_bytes(size)) for size, quantiser in parts]
        self.packed_bytes = sum(nbytes for _, _, nbytes in self._parts)

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        """Pack the piece as `Quantiser.pack` does."""
        lost, start, place = 0.0, 0, 0
        for number, (size, quantiser, nbytes) in enumerate(self._parts):
            part = slice(start, start + size)
            lost += quantiser.pack(array[part], message[place : place + nbytes], sent[part], key + number & _MOST)
            start, place = start + size, place + nbytes
        return lost

    def unpack(self, message: Bytes, out: Floats) -> None:
        """Write the packed values."""
        start, place = 0, 0
        for size, quantiser, nbytes in self._parts:
            quantiser.unpack(message[place : place + nbytes], out[start : start + size])
            start, place = start + size, place + nbytes

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        """Add ``factor`` times the packed values."""
        start, place = 0, 0
        for size, quantiser, nbytes in self._parts:
            quantiser.unpack_add(message[place : place + nbytes], factor, out[start : start + size])
            start, place = start + size, place + nbytes


def packers(compressor: Quantiser, sizes: Sequence[int]) -> list[Packer]:
    """Return the packer of each piece of an array; parts that ``compressor`` is bound to are packed separately."""
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
