"""Kernels for the elements above a threshold: count them, sum their excess, and select them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpicomp.kernels.gpu.bits import given, magnitude_bits
from mpicomp.kernels.gpu.compile import launch, remaining, sweeps
from mpicomp.kernels.gpu.reduce import Partials
from mpicomp.kernels.gpu.select import Rule, compact
from numpy import float64

_AT_ONCE = 8  # thresholds of a launch


class Tail(NamedTuple):
    """The elements whose magnitudes exceed a threshold, as 0-d device arrays."""

    count: Any
    """Number of these elements."""
    excess: Any
    """Sum of ``|x| - threshold`` over them."""
    squares: Any
    """Sum of ``(|x| - threshold)**2`` over them."""


def tail(array: Any, threshold: Any, stride: int = 1, threads: int = 1) -> Tail:
    """Count the elements above a threshold, and sum their excess; see `mpicomp.kernels.cpu.tail`.

    Parameters
    ----------
    array : device array, shape (n,)
        float32 or float64, contiguous.
    threshold : float, or 0-d device array
        Taken to the dtype of ``array`` first.
    stride : int
        1 looks at all elements, s at every s-th group of 1024 of them. Nothing is scaled up.
    threads : int
        Of no meaning here.
    """
    seen = remaining(array.size, stride)
    blocks = sweeps(seen, array.dtype)
    partials = Partials(blocks, 3)
    launch(
        "tail", "tail", array.dtype, blocks,
        array, array.size, seen, stride, *given(threshold, float64), partials.memory,
    )  # fmt: skip
    return Tail(partials.count(), partials.total(1), partials.total(2))


def counts_above(array: Any, thresholds: Sequence[float], threads: int = 1) -> list[Any]:
    """Count the elements above each of a few thresholds, eight in a launch; see `mpicomp.kernels.cpu.counts_above`.

    Returns
    -------
    list of 0-d device arrays of float64
        Integers, exact.
    """
    blocks = sweeps(array.size, array.dtype)
    counts: list[Any] = []
    for first in range(0, len(thresholds), _AT_ONCE):
        own = [float(threshold) for threshold in thresholds[first : first + _AT_ONCE]]
        partials = Partials(blocks, _AT_ONCE)
        filled = own + [own[0]] * (_AT_ONCE - len(own))
        launch("tail", "counts_above", array.dtype, blocks, array, array.size, *filled, partials.memory)
        counts += [partials.total(column) for column in range(len(own))]
    return counts


def select_above(array: Any, threshold: Any, base: int, indices: Any, values: Any, count: Any) -> Any:
    """Append the elements whose magnitudes exceed a threshold, ascending; see `mpicomp.kernels.cpu.select_above`.

    ``threshold`` and ``count`` may be 0-d device arrays.
    """
    threshold = magnitude_bits(threshold, array.dtype)
    return compact(array, threshold, Rule.ABOVE, indices, values=values, base=base, offset=count)


def select_listed(index: Any, listed: Any, threshold: Any, array: Any, indices: Any, values: Any) -> Any:
    """Do what `select_above` does among listed candidates; see `mpicomp.kernels.cpu.select_listed`."""
    threshold = magnitude_bits(threshold, array.dtype)
    return compact(array, threshold, Rule.ABOVE, indices, values=values, candidates=(index, listed))
