"""Arrays to selections and back, and scattered arrays gathered into one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu.scatter import WIRES, check_pieces
from mpicomp.kernels.gpu.compile import launch, library, scalar_arg, strides, sweeps, twin_of

KINDS = {"fp16": 1, "bf16": 2}  # 0 is the dtype of the output


@twin_of(cpu.gather)
def gather(array, indices, out):
    flags, good = _check(indices, array.size, out.dtype)
    count = indices.size
    launch("scatter", "gather", out.dtype, strides(count), array, indices, count, out, flags, good)
    return good[0]


# One thread sums an output, so that the result has the same bits at every call and on every rank. Indices that descend
# are refused as those out of range are.
@twin_of(cpu.scatter_add)
def scatter_add(indices, values, factor, out):
    flags, good = _check(indices, out.size, out.dtype)
    count, by = indices.size, scalar_arg(factor, np.float64)
    launch("scatter", "scatter_add", out.dtype, strides(count), indices, values, count, *by, out, flags, good)
    return good[0]


@twin_of(cpu.subtract_at)
def subtract_at(indices, values, out):
    launch("scatter", "subtract_at", out.dtype, strides(indices.size), indices, values, indices.size, out)


@twin_of(cpu.clear_at)
def clear_at(indices, out):
    launch("scatter", "clear_at", out.dtype, strides(indices.size), indices, indices.size, out)


def _check(indices, size, dtype):
    memory = library().zeros(3, np.uint64)
    launch("scatter", "check", dtype, strides(indices.size), indices, indices.size, size, memory)
    return memory[:2], memory[2:].view(np.bool_)


class Pieces:
    """Table on the device of addresses, kinds and places of pieces, valid as long as they stay there.

    The pieces are not kept alive.
    """

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._described = [_description(piece) for piece in pieces]
        self.number = len(pieces)
        rows = np.zeros((len(pieces) + 1, 3), np.int64)  # the last one has the end of the output
        for row, (address, _, dtype) in zip(rows, self._described, strict=False):
            row[0], row[2] = address, KINDS.get(WIRES.get(dtype, ""), 0)
        rows[1:, 1] = np.cumsum([size for _, size, _ in self._described])
        self.rows = library().asarray(rows)

    def fits(self, pieces: Sequence[Any]) -> bool:
        """Return whether these pieces have the addresses, lengths and dtypes of the table."""
        return self._described == [_description(piece) for piece in pieces]


def _description(piece: Any) -> tuple[int, int, Any]:
    return int(piece.data.ptr), int(piece.size), piece.dtype


def table_of(pieces: Sequence[Any], out: Any, table: Pieces | None) -> Pieces:
    """Return the table of pieces that fill ``out``: the one that is passed, where it fits."""
    check_pieces(pieces, out)
    return table if table is not None and table.fits(pieces) else Pieces(pieces)


# One launch for any number of pieces. Their table goes to the device first, where the one that is passed does not fit.
@twin_of(cpu.concatenate)
def concatenate(pieces, out, scale=1.0, table=None):
    table = table_of(pieces, out, table)
    launch(
        "pieces", "concatenate", out.dtype, sweeps(out.size, out.dtype),
        table.rows, table.number, *scalar_arg(scale, np.float64), out, out.size,
    )  # fmt: skip
    return table
