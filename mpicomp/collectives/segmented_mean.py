"""A sum over ranks that becomes a mean segment by segment, as the segments arrive."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Result, gain_of
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.device import received_on_host, to_python


class SegmentedMean:
    """Adds and divides segments while others are under way, and notes whether all of them are finite.

    Arrays have ``numel + TRAILER`` elements: behind the values stand the numbers of non-finite and of stale ranks, the
    energy and the lost energy, which are summed and never divided.

    Parameters
    ----------
    accumulated : GradientWithResidual
        This rank's own.
    ranks : int
        Number of ranks, by which sums are divided.
    """

    def __init__(self, accumulated: GradientWithResidual, ranks: int) -> None:
        self._accumulated = accumulated
        self._ranks = ranks
        self._finite: Any = True

    def adds(
        self,
        array: NDArray[np.floating],
        offset: int,
        other: Callable[[int, int], NDArray[np.floating]],
        complete: bool,
    ) -> Callable[[int, int], None]:
        """Return a function that adds to segments of ``array`` and, where sums are complete, divides them.

        Parameters
        ----------
        array : array, shape (numel + TRAILER,)
            Where segments arrive.
        offset : int
            Where the part that they are segments of begins.
        other : callable
            Returns the part of the array that is added, between two places.
        complete : bool
            Whether that was the last rank's share.
        """

        def arrived(start: int, stop: int) -> None:
            segment = array[offset + start : offset + stop]
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(segment, other(offset + start, offset + stop), out=segment)
            if complete:
                self.divide(array, offset + start, offset + stop)

        return arrived

    def sees(self, array: NDArray[np.floating], offset: int) -> Callable[[int, int], None]:
        """Return a function that checks whether segments of ``array``, which are means already, are finite."""

        def arrived(start: int, stop: int) -> None:
            values = self._values(array, offset + start, offset + stop)
            # Squares of finite numbers overflow too, and are then not worth a fast answer.
            on_host = isinstance(values, np.ndarray)
            quick = on_host and bool(np.isfinite(kernels.energy(values)))
            self._finite = self._finite & (quick or np.isfinite(values).all())

        return arrived

    def divide(self, array: NDArray[np.floating], start: int, stop: int) -> None:
        """Make sums means in place, the tail left as it is."""
        values = self._values(array, start, stop)
        self._finite = self._finite & kernels.is_finite(kernels.scale(values, 1 / self._ranks), values.dtype)

    def result(self, array: NDArray[np.floating]) -> Result:
        """Return the result, once all segments of ``array`` were divided or seen."""
        numel = self._accumulated.numel
        nonfinite, stale, energy, lost = received_on_host(array[numel : numel + TRAILER]).tolist()
        [finite] = to_python(self._finite)
        return Result(
            mean=array[:numel],
            sent=self._accumulated.array(),
            energy=energy,
            gain=gain_of(lost, energy),
            kept=float(numel),
            nonfinite=nonfinite > 0 or not finite,
            stale=stale > 0,
        )

    def _values(self, array: NDArray[np.floating], start: int, stop: int) -> NDArray[np.floating]:
        return array[start : min(stop, self._accumulated.numel)]
