"""Arrays to selections and back: gather, scatter-add, and the subtraction of sent elements."""

import numpy as np
from mpicomp.kernels.cpu.compile import Floats, Indices, exact, kernel


def gather(array: Floats, indices: Indices, out: Floats) -> bool:
    """Write ``array[indices]`` to ``out``; False, and nothing beyond that index, where one is out of range."""
    return bool(_gather(array, indices, out))


def scatter_add(indices: Indices, values: Floats, factor: float, out: Floats) -> bool:
    """Add ``factor * values`` to ``out`` at ``indices``, which may repeat, in their order.

    The factor is rounded to the dtype of ``out``. Return False, and write nothing, where an index is out of range.
    """
    return bool(_scatter_add(indices, values, out.dtype.type(factor), out))


def subtract_at(indices: Indices, values: Floats, out: Floats) -> None:
    """Subtract ``values`` from ``out`` at ``indices``, which are in range and do not repeat."""
    _subtract_at(indices, values, out)


def clear_at(indices: Indices, out: Floats) -> None:
    """Set ``out`` to zero at ``indices``, which are in range."""
    _clear_at(indices, out)


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


@kernel
def _subtract_at(indices, values, out):  # type: ignore[no-untyped-def]
    for j in range(indices.size):
        out[indices[j]] -= values[j]


@kernel
def _clear_at(indices, out):  # type: ignore[no-untyped-def]
    for j in range(indices.size):
        out[indices[j]] = 0
