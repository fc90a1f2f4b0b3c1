"""Kernels for moments of an array's magnitudes: counts, sums of magnitudes, of squares and of logarithms."""

from typing import Any, NamedTuple

from mpicomp.kernels.gpu.compile import launch, remaining, sweeps
from mpicomp.kernels.gpu.reduce import Partials


class Moments(NamedTuple):
    """Moments of an array's magnitudes from one sweep, as 0-d device arrays; sums are in float64."""

    nonzero: Any
    """Elements that are not zero."""
    total: Any
    """Sum of magnitudes."""
    energy: Any
    """Sum of squares."""
    finite: Any
    """Whether no element is infinite or NaN."""

    def __add__(self, other: "Moments") -> "Moments":  # type: ignore[override]
        """Return the moments of two arrays taken together."""
        return Moments(
            self.nonzero + other.nonzero,
            self.total + other.total,
            self.energy + other.energy,
            self.finite & other.finite,
        )


def logarithms(array: Any, stride: int = 1, threads: int = 1) -> tuple[Any, Any, Any]:
    """Sum magnitudes and their natural logarithms over the elements that are not zero.

    Parameters
    ----------
    array : device array, shape (n,)
        float32 or float64, contiguous.
    stride : int
        1 looks at all elements, s at every s-th group of 1024 of them. Nothing is scaled up.
    threads : int
        Of no meaning here.

    Returns
    -------
    nonzero, total, logarithm : 0-d device arrays
        Number of elements that were summed, and the sums.
    """
    seen = remaining(array.size, stride)
    blocks = sweeps(seen, array.dtype)
    partials = Partials(blocks, 3)
    launch("moments", "logarithms", array.dtype, blocks, array, array.size, seen, stride, partials.memory)
    return partials.count(), partials.total(1), partials.total(2)
