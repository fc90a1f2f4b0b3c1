"""Signs as votes: the majority of ranks for each element.

Bit j of word w is set where element ``64 * w + j`` is negative, by its sign bit, as in `mpicomp.kernels.cpu.signs`.
"""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits
from mpicomp.kernels.cpu.compile import Floats, Words, kernel
from mpicomp.kernels.cpu.signs import _signs, _write

_PLANES = 33  # bits of a count, with room for the carry


def pack_votes(array: Floats, words: Words) -> None:
    """Reduce an array to its signs, with zeros after the last element."""
    _pack_votes(as_bits(array), words)


def majority(votes: Words, out: Words) -> None:
    """Write the signs that more than half of the rows of ``votes`` have; a tie counts as plus."""
    _majority(votes, out)


def unpack_votes(words: Words, value: float, out: Floats) -> None:
    """Write ``-value`` where a bit is set and ``value`` elsewhere, to a float32 or float64 array of shape (n,)."""
    _unpack_votes(words, out.dtype.type(value), out)


@kernel
def _pack_votes(bits, words):  # type: ignore[no-untyped-def]
    _signs(bits, 0, bits.size, words)


@kernel
def _majority(votes, out):  # type: ignore[no-untyped-def]
    # Sixty-four counts at once: plane p holds bit p of each.
    ranks = votes.shape[0]
    width = 0
    while ranks >> width:
        width += 1
    half = ranks // 2
    planes = np.empty(_PLANES, np.uint64)
    for w in range(out.size):
        planes[:] = 0
        for rank in range(ranks):
            carry = votes[rank, w]
            for plane in range(width):
                kept = planes[plane] & carry
                planes[plane] ^= carry
                carry = kept
        more, equal = np.uint64(0), ~np.uint64(0)
        for plane in range(width - 1, -1, -1):
            if half >> plane & 1:
                equal &= planes[plane]
            else:
                more |= equal & planes[plane]
                equal &= ~planes[plane]
        out[w] = more


@kernel
def _unpack_votes(words, value, out):  # type: ignore[no-untyped-def]
    _write(words, 0, out.size, value, out, None)
