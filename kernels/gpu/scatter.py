"""Arrays to selections and back: gather, scatter-add, and the subtraction of sent elements."""

from typing import Any

import numpy as np
from mpicomp.kernels.gpu.bits import given
from mpicomp.kernels.gpu.compile import launch, library, strides


def gather(array: Any, indices: Any, out: Any) -> Any:
    """Write ``array[indices]`` to ``out``; False, as a 0-d array, and nothing written where one is out of range."""
    flags, good = _check(indices, array.size, out.dtype)
    count = indices.size
    launch("scatter", "gather", out.dtype, strides(count), array, indices, count, out, flags, good)
    return good[0]


def scatter_add(indices: Any, values: Any, factor: Any, out: Any) -> Any:
    """Add ``factor * values`` to ``out`` at ``indices``, in the order given; see `mpicomp.kernels.cpu.scatter_add`.

    Every output is summed by one thread, so that the result has the same bits at every call and on every rank. This
    is quick where indices ascend, repeated or not; where they do not, every block goes through all of them.
    """
    flags, good = _check(indices, out.size, out.dtype)
    count, by = indices.size, given(factor, np.float64)
    launch("scatter", "scatter_ascending", out.dtype, strides(count), indices, values, count, *by, out, flags, good)
    launch(
        "scatter", "scatter_unordered", out.dtype, strides(out.size),
        indices, values, count, *by, out, out.size, flags,
    )  # fmt: skip
    return good[0]


def subtract_at(indices: Any, values: Any, out: Any) -> None:
    """Subtract ``values`` from ``out`` at ``indices``, which are in range and do not repeat."""
    launch("scatter", "subtract_at", out.dtype, strides(indices.size), indices, values, indices.size, out)


def clear_at(indices: Any, out: Any) -> None:
    """Set ``out`` to zero at ``indices``, which are in range."""
    launch("scatter", "clear_at", out.dtype, strides(indices.size), indices, indices.size, out)


def _check(indices: Any, size: int, dtype: Any) -> tuple[Any, Any]:
    memory = library().zeros(3, np.uint64)
    launch("scatter", "check", dtype, strides(indices.size), indices, indices.size, size, memory)
    return memory[:2], memory[2:].view(np.bool_)
