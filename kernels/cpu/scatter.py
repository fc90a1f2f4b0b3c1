"""Arrays to selections and back, and scattered pieces of an array written one after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.cast import widen
from mpicomp.kernels.cpu.compile import Floats, Indices, exact, kernel
from numpy.typing import NDArray

WIRES = {np.dtype(np.float16): "fp16", np.dtype(np.uint16): "bf16"}  # integers of 16 bits are bfloat16


def gather(array: Floats, indices: Indices, out: Floats) -> bool:
    """Write ``array[indices]`` to ``out``; False, and nothing beyond that index, where one is out of range."""
    return bool(_gather(array, indices, out))


def scatter_add(indices: Indices, values: Floats, factor: float, out: Floats) -> bool:
    """Add ``factor * values`` to ``out`` at ``indices``, which may repeat, in their order.

    The factor is rounded to the dtype of ``out``. Return False, and write nothing, where an index is out of range.
    """
    return bool(_scatter_add(indices, values, out.dtype.type(factor), out))


@kernel
def subtract_at(indices: Indices, values: Floats, out: Floats) -> None:
    """Subtract ``values`` from ``out`` at ``indices``, which are in range and do not repeat."""
    for j in range(indices.size):
        out[indices[j]] -= values[j]


@kernel
def clear_at(indices: Indices, out: Floats) -> None:
    """Set ``out`` to zero at ``indices``, which are in range."""
    for j in range(indices.size):
        out[indices[j]] = 0


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
    is rounded to the dtype of ``out``; 1 changes no bit. ``table`` is the result of an earlier call.
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


@kernel
def _in_range(indices, size):  # type: ignore[no-untyped-def]
    largest = np.uint32(0)
    for j in range(indices.size):
        largest = max(largest, indices[j])
    return indices.size == 0 or largest < size


@kernel
def _gather(array, indices, out):  # type: ignore[no-untyped-def]
    if not _in_range(indices, array.size):
        return False
    for j in range(indices.size):
        out[j] = array[indices[j]]
    return True


@exact  # every rank adds up the mean for itself
def _scatter_add(indices, values, factor, out):  # type: ignore[no-untyped-def]
    if not _in_range(indices, out.size):
        return False
    for j in range(indices.size):
        out[indices[j]] += factor * values[j]
    return True


@exact
def add_ascending(indices, values, factor, out):  # type: ignore[no-untyped-def]
    """Add ``factor * values`` at indices that ascend below n; if they do not, write nothing and return False."""
    wrong = np.uint32(0)
    for j in range(1, indices.size):
        wrong |= np.uint32(indices[j] <= indices[j - 1])  # no early end: so it vectorises
    if wrong != 0 or (indices.size > 0 and indices[indices.size - 1] >= out.size):
        return False
    for j in range(indices.size):
        out[indices[j]] += factor * values[j]
    return True
