"""Which route is faster for a message of a given length, as it was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RouteTable:
    """Seconds of both routes, the same on all ranks.

    Parameters
    ----------
    sizes : sequence of int
        Bytes, ascending.
    seconds : mapping of str to sequence of float
        By route, those of each size.
    identical_sums : bool
        Whether a library's sum of floating numbers on the direct route has the same bits on all ranks.
    sums : mapping of str to sequence of float, optional
        By route, seconds of a library's sum of as many bytes, which may be slow where messages are fast. Without it
        messages count for sums, too.

    Examples
    --------
    >>> table = RouteTable((1_000, 100_000), {"direct": (4e-6, 8e-5), "staged": (9e-6, 5e-5)}, True)
    >>> table.faster(2_000), table.faster(90_000), table.faster(10**9)
    ('direct', 'staged', 'staged')
    >>> sums = {"direct": (2e-3, 9e-3), "staged": (3e-5, 1e-4)}
    >>> RouteTable(table.sizes, table.seconds, True, sums).faster(2_000, summed=True)
    'staged'
    """

    sizes: Sequence[int]
    seconds: Mapping[str, Sequence[float]]
    identical_sums: bool
    sums: Mapping[str, Sequence[float]] | None = None

    @classmethod
    def always(cls, route: str) -> "RouteTable":
        """Return one that takes a route for every message."""
        return cls((1,), {route: (1.0,)}, identical_sums=True)

    def faster(self, nbytes: int, summed: bool = False) -> str:
        """Return the faster route for so many bytes, in a sum if so said; beyond the sizes the nearest one counts."""
        place, known = np.log(max(1, nbytes)), np.log(self.sizes)
        seconds = self.sums if summed and self.sums is not None else self.seconds
        return min(seconds, key=lambda route: float(np.interp(place, known, np.log(seconds[route]))))
