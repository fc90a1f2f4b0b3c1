"""Count sketches: an array summed into a small table, from which its large elements can be found.

Every row of a table puts each element into one of its columns, with a sign, both by a hash of the element's index.
Tables with one key can be summed, as the arrays could have been.
"""

import numpy as np
from mpicomp.kernels.cpu.bits import draw, halves
from mpicomp.kernels.cpu.compile import Floats, Indices, exact, kernel

_BLOCK = 1024  # elements whose hashes are made at once: a loop that vectorises, and what it writes stays in the cache


def sketch_add(array: Floats, key: int, table: Floats) -> None:
    """Add an array of fewer than 2**32 elements to a table of shape (rows, columns), by a key of 64 bits."""
    _sketch_add(array, *halves(key), table)


def sketch_estimate(table: Floats, key: int, out: Floats) -> None:
    """Write the estimate of each element, the median over an odd number of rows: the same bits on every processor."""
    _sketch_estimate(table, *halves(key), out)


def sketch_clear(indices: Indices, key: int, table: Floats) -> None:
    """Set the cells of a table to zero that elements with these indices are in, others in them included."""
    _sketch_clear(indices, *halves(key), table)


@kernel
def _row_key(row, low, high):  # type: ignore[no-untyped-def]
    return draw(2 * row, low, high), draw(2 * row + 1, low, high)


@kernel
def _column(word, columns):  # type: ignore[no-untyped-def]
    # The upper bits choose the column, and the lowest one is left for the sign.
    return np.int64((np.uint64(word) * np.uint64(columns)) >> np.uint64(32))


@kernel
def _hash(start, low, high, words):  # type: ignore[no-untyped-def]
    first = np.uint32(start)
    for j in range(words.size):
        words[j] = draw(np.uint32(first + np.uint32(j)), low, high)


@kernel
def _sketch_add(array, low, high, table):  # type: ignore[no-untyped-def]
    # Row by row: of a large table one row may still be in the cache.
    words = np.empty(_BLOCK, np.uint32)
    for row in range(table.shape[0]):
        row_low, row_high = _row_key(row, low, high)
        cells = table[row]
        for start in range(0, array.size, _BLOCK):
            part = array[start : start + _BLOCK]
            _hash(start, row_low, row_high, words[: part.size])
            for j in range(part.size):
                cells[_column(words[j], cells.size)] += -part[j] if words[j] & np.uint32(1) else part[j]


@exact
def _sketch_estimate(table, low, high, out):  # type: ignore[no-untyped-def]
    rows = table.shape[0]
    words = np.empty(_BLOCK, np.uint32)
    rows_of_estimates = np.empty((rows, _BLOCK), table.dtype)
    for start in range(0, out.size, _BLOCK):
        part = out[start : start + _BLOCK]
        for row in range(rows):
            row_low, row_high = _row_key(row, low, high)
            _hash(start, row_low, row_high, words[: part.size])
            cells, estimates = table[row], rows_of_estimates[row]
            for j in range(part.size):
                cell = cells[_column(words[j], cells.size)]
                estimates[j] = -cell if words[j] & np.uint32(1) else cell
        # Bubbles: once the upper half is in its place the middle is, too.
        for last in range(rows - 1, rows // 2 - 1, -1):
            for row in range(last):
                _order(rows_of_estimates[row], rows_of_estimates[row + 1], part.size)
        part[:] = rows_of_estimates[rows // 2, : part.size]


@exact
def _order(lower, upper, count):  # type: ignore[no-untyped-def]
    for j in range(count):
        one, other = lower[j], upper[j]
        lower[j] = other if other < one else one
        upper[j] = one if other < one else other


@kernel
def _sketch_clear(indices, low, high, table):  # type: ignore[no-untyped-def]
    for row in range(table.shape[0]):
        row_low, row_high = _row_key(row, low, high)
        cells = table[row]
        for j in range(indices.size):
            cells[_column(draw(indices[j], row_low, row_high), cells.size)] = 0
