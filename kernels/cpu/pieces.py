"""Pieces of an array that lie here and there, put one behind the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.cast import widen
from numpy.typing import NDArray

WIRES = {np.dtype(np.float16): "fp16", np.dtype(np.uint16): "bf16"}  # what integers of 16 bits stand for: bfloat16


class Pieces:
    """What `concatenate` has found out about pieces, to be passed again: nothing, on the host.

    Parameters
    ----------
    pieces : sequence of arrays
        As in `concatenate`.
    """

    def __init__(self, pieces: Sequence[NDArray[Any]]) -> None:
        pass

    def fits(self, pieces: Sequence[NDArray[Any]]) -> bool:
        """Return whether this is what is known of these pieces."""
        return True


def concatenate(
    pieces: Sequence[NDArray[Any]], out: NDArray[np.floating], scale: float = 1.0, table: Pieces | None = None
) -> Pieces:
    """Write pieces one behind the other, each of them times ``scale``.

    Parameters
    ----------
    pieces : sequence of arrays
        Contiguous and one-dimensional, of the dtype of ``out``, of float16, or of uint16, which stands for bfloat16.
    out : array, shape (n,)
        float32 or float64; n is the sum of the pieces' lengths.
    scale : float
        Taken to the dtype of ``out`` before it multiplies; 1 leaves all bits as they are.
    table : Pieces, optional
        What an earlier call has returned. Where it does not fit, another one is made.

    Returns
    -------
    Pieces
        To be passed with the next call.

    Raises
    ------
    ValueError
        Where the pieces do not fill ``out``, or have another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> out = np.empty(3, np.float32)
    >>> table = concatenate([np.array([1, 2], np.float16), np.array([5], np.float32)], out, 0.5)
    >>> out.tolist()
    [0.5, 1.0, 2.5]
    """
    check_pieces(pieces, out)
    by, start = out.dtype.type(scale), 0
    for piece in pieces:
        part, source = out[start : start + piece.size], piece
        start += piece.size
        if piece.dtype in WIRES:
            widen(piece.view(np.uint16), WIRES[piece.dtype], part)
            source = part
        if by != 1:
            with np.errstate(all="ignore"):
                np.multiply(source, by, out=part)
        elif source is not part:
            part[:] = source
    return Pieces(pieces) if table is None else table


def check_pieces(pieces: Sequence[Any], out: Any) -> None:
    """Refuse pieces that do not fill ``out``, or that cannot become numbers of its dtype."""
    total = sum(piece.size for piece in pieces)
    if total != out.size:
        raise ValueError(f"concatenate: pieces of {total} elements do not fill {out.size}")
    for piece in pieces:
        if piece.dtype != out.dtype and piece.dtype not in WIRES:
            raise ValueError(f"concatenate: pieces must be of {out.dtype}, float16 or uint16, got {piece.dtype}")
