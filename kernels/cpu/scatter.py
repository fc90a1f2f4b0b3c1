"""Arrays to selections and back: gather, scatter-add, and the subtraction of sent elements."""

import numpy as np
from mpicomp.kernels.cpu.compile import exact, kernel
from numpy.typing import NDArray


def gather(array: NDArray[np.floating], indices: NDArray[np.uint32], out: NDArray[np.floating]) -> bool:
    """Write ``array[indices]`` to ``out``; False, and nothing beyond that index, where one is out of range."""
    return bool(_gather(array, indices, out))


def scatter_add(
    indices: NDArray[np.uint32], values: NDArray[np.floating], factor: float, out: NDArray[np.floating]
) -> bool:
    """Add ``factor * values`` to ``out`` at ``indices``, in their order.

    Parameters
    ----------
    indices : array of uint32, shape (k,)
        May repeat; every occurrence counts.
    values : array, shape (k,)
        Of the dtype of ``out``.
    factor : float
        Taken to the dtype of ``out`` before it multiplies.
    out : array, shape (n,)
        float32 or float64.

    Returns
    -------
    bool
        False where an index is not below n. Nothing is then written at all.

    Examples
    --------
    >>> import numpy as np
    >>> out = np.zeros(4, np.float32)
    >>> scatter_add(np.array([3, 1, 3], np.uint32), np.array([2, 4, 6], np.float32), 0.5, out)
    True
    >>> out.tolist()
    [0.0, 2.0, 0.0, 4.0]
    """
    return bool(_scatter_add(indices, values, out.dtype.type(factor), out))


def subtract_at(indices: NDArray[np.uint32], values: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    """Subtract ``values`` from ``out`` at ``indices``, which are in range and do not repeat."""
    _subtract_at(indices, values, out)


def clear_at(indices: NDArray[np.uint32], out: NDArray[np.floating]) -> None:
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


@kernel
def _subtract_at(indices, values, out):  # type: ignore[no-untyped-def]
    for j in range(indices.size):
        out[indices[j]] -= values[j]


@kernel
def _clear_at(indices, out):  # type: ignore[no-untyped-def]
    for j in range(indices.size):
        out[indices[j]] = 0
