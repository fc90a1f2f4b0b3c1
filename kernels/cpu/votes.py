"""Signs as votes: the majority of ranks for each element.

Bit j of word w is set where element ``64 * w + j`` is negative, by its sign bit, as in `mpicomp.kernels.cpu.signs`.
"""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits
from mpicomp.kernels.cpu.compile import kernel
from mpicomp.kernels.cpu.signs import _signs, _write
from numpy.typing import NDArray

_PLANES = 33  # bits of a count, with room for the carry


def pack_votes(array: NDArray[np.floating], words: NDArray[np.uint64]) -> None:
    """Reduce an array to its signs.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64, contiguous.
    words : array of uint64, shape (ceil(n / 64),)
        Receives them; bits behind the last element are zero.

    Examples
    --------
    >>> import numpy as np
    >>> words = np.empty(1, np.uint64)
    >>> pack_votes(np.array([1, -3, 0], np.float32), words)
    >>> words.tolist()
    [2]
    """
    _pack_votes(as_bits(array), words)


def majority(votes: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Write the signs that more than half of the ranks have voted for; a tie counts as plus.

    Parameters
    ----------
    votes : array of uint64, shape (ranks, words)
        As `pack_votes` has left them.
    out : array of uint64, shape (words,)
        Receives the signs that have won.

    Examples
    --------
    >>> import numpy as np
    >>> out = np.empty(1, np.uint64)
    >>> majority(np.array([[0b011], [0b101], [0b001]], np.uint64), out)
    >>> bin(out[0])
    '0b1'
    """
    _majority(votes, out)


def unpack_votes(words: NDArray[np.uint64], value: float, out: NDArray[np.floating]) -> None:
    """Write ``-value`` where a bit is set and ``value`` elsewhere, to a float32 or float64 array of shape (n,)."""
    _unpack_votes(words, out.dtype.type(value), out)


@kernel
def _pack_votes(bits, words):  # type: ignore[no-untyped-def]
    _signs(bits, words)


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
    _write(words, value, out)
