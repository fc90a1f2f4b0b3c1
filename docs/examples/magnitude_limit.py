"""A compressor in one file: it sends every element above a fixed magnitude."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import mpicomp
from mpicomp.compressors import Accumulated, Scope
from mpicomp.errors import ConfigurationError


@mpicomp.register
@dataclass(frozen=True)
class MagnitudeLimit(mpicomp.Sparsifier):
    """Everything above a magnitude, possibly nothing.

    Parameters
    ----------
    limit : float
        Elements of larger magnitude are sent.
    """

    id: ClassVar[str] = "magnitude-limit"
    paper: ClassVar[str] = "none: an example"

    limit: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.limit >= 0:
            raise ConfigurationError(f"magnitude-limit: limit must be at least 0, got {self.limit!r}")

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Guess that one element of a hundred is sent: four bytes of index, and the value."""
        return 0.01 * (4 + itemsize)

    def select(self, accumulated: Accumulated, scope: Scope) -> mpicomp.Selection:
        """Select what is above the limit."""
        array = accumulated.array()
        indices = np.flatnonzero(np.abs(array) > self.limit).astype(np.uint32)
        return mpicomp.Selection(indices, array[indices])
