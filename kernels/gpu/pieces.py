"""Pieces of an array that lie here and there, put one behind the other in one launch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.pieces import WIRES, check_pieces
from mpicomp.kernels.gpu.bits import given
from mpicomp.kernels.gpu.compile import launch, library, sweeps

KINDS = {"fp16": 1, "bf16": 2}  # 0 is the dtype of the output


class Pieces:
    """Table on the device of where pieces are, of which kind, and where they go: it serves as long as they stay there.

    Parameters
    ----------
    pieces : sequence of device arrays
        As in `mpicomp.kernels.cpu.concatenate`. They are not kept alive.
    """

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._known = [_place(piece) for piece in pieces]
        rows = np.zeros((len(pieces) + 1, 3), np.int64)  # the last one says where the output ends
        for row, (address, _, dtype) in zip(rows, self._known, strict=False):
            row[0], row[2] = address, KINDS.get(WIRES.get(dtype, ""), 0)
        rows[1:, 1] = np.cumsum([size for _, size, _ in self._known])
        self.rows = library().asarray(rows)

    def fits(self, pieces: Sequence[Any]) -> bool:
        """Return whether these pieces are where those of the table were, as long and of the same dtypes."""
        return self._known == [_place(piece) for piece in pieces]


def concatenate(pieces: Sequence[Any], out: Any, scale: Any = 1.0, table: Pieces | None = None) -> Pieces:
    """Write pieces one behind the other, each of them times ``scale``; see `mpicomp.kernels.cpu.concatenate`.

    One launch for any number of pieces. Their table goes to the device before it, where the one that is passed does not
    fit. ``scale`` may be a 0-d device array.
    """
    check_pieces(pieces, out)
    if table is None or not table.fits(pieces):
        table = Pieces(pieces)
    launch(
        "pieces", "concatenate", out.dtype, sweeps(out.size, out.dtype),
        table.rows, len(pieces), *given(scale, np.float64), out, out.size,
    )  # fmt: skip
    return table


def _place(piece: Any) -> tuple[int, int, Any]:
    return int(piece.data.ptr), int(piece.size), piece.dtype
