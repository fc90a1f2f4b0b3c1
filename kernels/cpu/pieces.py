"""Concatenation of scattered pieces of an array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.cast import widen
from mpicomp.kernels.cpu.compile import Floats
from numpy.typing import NDArray

WIRES = {np.dtype(np.float16): "fp16", np.dtype(np.uint16): "bf16"}  # what integers of 16 bits stand for: bfloat16


class Pieces:
    """Table of pieces that `concatenate` returns for its next call; on the host it is empty."""

    def __init__(self, pieces: Sequence[NDArray[Any]]) -> None:
        pass

    def fits(self, pieces: Sequence[NDArray[Any]]) -> bool:
        """Return whether the table is that of these pieces."""
        return True


def concatenate(pieces: Sequence[NDArray[Any]], out: Floats, scale: float = 1.0, table: Pieces | None = None) -> Pieces:
    """Write pieces one after the other, each of them times ``scale``, and return the table for the next call.

    Pieces are of the dtype of ``out``, of float16, or of uint16, which stands for bfloat16, and fill ``out``. The scale
    is rounded to the dtype of ``out``; 1 leaves all bits as they are. ``table`` is what an earlier call has returned.
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
