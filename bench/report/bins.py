"""Fewer points than steps: neighbouring steps together, of which the least, the median and the most are kept."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.report.lines import Array
from numpy.typing import NDArray

MOST = 100  # points of a curve, which is as many as a narrow picture can show


@dataclass(frozen=True)
class Bins:
    """Neighbouring steps, put together.

    Attributes
    ----------
    edges : array of int
        Place of the first step of each, and behind the last one the number of steps.
    """

    edges: NDArray[np.intp]

    @property
    def largest(self) -> int:
        """Most steps in one."""
        return int(np.diff(self.edges).max())

    def each(self, of: str, values: Array) -> Array:
        """Return ``min``, ``median``, ``max`` or ``mean`` over the steps of each, leaving NaN out.

        Parameters
        ----------
        of : str
            Which of the four.
        values : array, shape (steps, ...)

        Returns
        -------
        array, shape (bins, ...)
            NaN where all are.
        """
        function: Any = {"min": np.min, "median": np.median, "max": np.max, "mean": np.mean}[of]
        without: Any = {"min": np.nanmin, "median": np.nanmedian, "max": np.nanmax, "mean": np.nanmean}[of]
        found = np.full((self.edges.size - 1, *values.shape[1:]), np.nan)
        for place, (first, end) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            part = values[first:end]
            absent = np.isnan(part)
            if not absent.any():
                found[place] = function(part, axis=0)
            elif values.ndim == 1:
                found[place] = without(part) if not absent.all() else np.nan
            else:
                some = ~absent.all(axis=0)
                found[place, some] = without(part[:, some], axis=0)
        return found

    def last(self, values: Array) -> Array:
        """Return the value of each one's last step."""
        return values[self.edges[1:] - 1]

    def in_words(self, what: str = "point") -> str:
        """Return what a picture's caption says of it.

        Examples
        --------
        >>> put_together(10_000).in_words()
        'each point stands for 100 steps'
        """
        if self.largest == 1:
            return f"each {what} is one step"
        least = int(np.diff(self.edges).min())
        return f"each {what} stands for {self.largest if least == self.largest else f'{least} or {self.largest}'} steps"


def put_together(steps: int, most: int = MOST, smooth: int = 5) -> Bins:
    """Return bins of about equal size.

    Parameters
    ----------
    steps : int
        How many there are.
    most : int
        Largest number of bins.
    smooth : int
        Steps that are put together at least, where there are many more of them.
    """
    count = steps if steps < 8 * smooth else min(most, steps // smooth)
    return Bins(np.linspace(0, steps, count + 1).round().astype(np.intp))
