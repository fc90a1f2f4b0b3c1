"""Count sketches: an array summed into a small table, from which its large elements can be told."""

from typing import Any

from mpicomp.kernels.cpu.random import halves
from mpicomp.kernels.gpu.compile import THREADS, launch, strides

ROWS = 15
"""The most that an estimate can take the middle of: they lie in the memory that threads of a block share."""

PART = 2048
"""Cells of a row that a block sums at a time, going through all elements: more of them leave devices idle."""


def sketch_add(array: Any, key: int, table: Any) -> None:
    """Add an array to a table, in the order of the array; see `mpicomp.kernels.cpu.sketch_add`.

    Every cell is summed by one thread, so that a table has the same bits at every call, and those of the CPU's. The
    time is in proportion to elements times cells, as every block goes through all elements.
    """
    rows, columns = table.shape
    launch(
        "countsketch", "sketch_add", table.dtype, strides(THREADS * rows * -(-columns // PART)),
        array, array.size, *map(int, halves(key)), table, rows, columns,
    )  # fmt: skip


def sketch_estimate(table: Any, key: int, out: Any) -> None:
    """Write a table's estimate of each element: the median over its rows; see `mpicomp.kernels.cpu.sketch_estimate`.

    Raises
    ------
    ValueError
        Where the table has more than `ROWS` rows.
    """
    rows, columns = table.shape
    if rows > ROWS:
        raise ValueError(f"sketch_estimate: a table on a device has at most {ROWS} rows, got {rows}: take fewer rows")
    launch(
        "countsketch", "sketch_estimate", table.dtype, strides(out.size),
        table, rows, columns, *map(int, halves(key)), out, out.size,
    )  # fmt: skip


def sketch_clear(indices: Any, key: int, table: Any) -> None:
    """Set a table's cells to zero that elements with these indices are in; see `mpicomp.kernels.cpu.sketch_clear`."""
    rows, columns = table.shape
    launch(
        "countsketch", "sketch_clear", table.dtype, strides(indices.size),
        indices, indices.size, *map(int, halves(key)), table, rows, columns,
    )  # fmt: skip
