"""What every compressor is: a frozen set of parameters with a name, that turns an array into a message."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.workspace import Workspace


@dataclass(frozen=True)
class Compressor(ABC):
    """A frozen dataclass whose fields are its parameters, each with a default.

    Two compressors are equal when their configurations are. State that lives from step to step is not kept here
    but in the memory of the bucket that is compressed, so one object can serve many buckets.
    """

    id: ClassVar[str]
    """The name in the registry."""
    family: ClassVar[str]
    """``"dense"``, ``"sparsifier"`` ..."""
    message: ClassVar[str]
    """What travels: ``"dense"`` (an array that ranks can sum) or ``"sparse"`` (indices and values)."""
    paper: ClassVar[str]
    """Where it comes from, and what is done differently."""

    @property
    @abstractmethod
    def feedback(self) -> bool:
        """Whether it runs with error feedback when nothing else is said."""

    @abstractmethod
    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Bytes of message for one element of the array that is compressed, on the average, headers left out."""

    def get_config(self) -> dict[str, Any]:
        """Give a JSON-able configuration that `mpicomp.get_compressor` turns into an equal compressor."""
        return {"id": self.id} | {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_config(cls, parameters: Mapping[str, Any]) -> Self:
        """Build one from its parameters, refusing those that it does not have."""
        known = [field.name for field in fields(cls)]
        for name in parameters:
            if name not in known:
                if not known:
                    raise ConfigurationError(f"{cls.id}: has no parameters, got '{name}'")
                raise UnknownNameError(f"{cls.id} parameter", name, known)
        return cls(**parameters)


@dataclass
class Selection:
    """Elements of an array: ``indices`` ascending without repetition, and the array's ``values`` there."""

    indices: NDArray[np.uint32]
    values: NDArray[np.floating]


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """A compressor that sends some elements as they are and keeps the others back.

    To add one: derive from it, give `select` and, where the number of selected elements depends on the
    array's length alone, `count`; register it with `mpicomp.register_compressor`.
    """

    family: ClassVar[str] = "sparsifier"
    message: ClassVar[str] = "sparse"

    @property
    def feedback(self) -> bool:
        """Sparsifiers that pick by magnitude are biased: what is not sent has to be kept."""
        return True

    def count(self, numel: int) -> int | None:
        """Give the number of elements selected out of ``numel``; None where the values decide it."""
        return None

    @abstractmethod
    def select(self, accumulated: Accumulated, memory: dict[str, Any], workspace: Workspace) -> Selection:
        """Choose what is sent.

        Parameters
        ----------
        accumulated : Accumulated
            Gradient plus residual; ``accumulated.array()`` is the plain array. Not empty.
        memory : dict
            This bucket's memory from step to step: a hint, never something that the result depends on.
        workspace : Workspace
            Where arrays that are needed at every step come from.

        Returns
        -------
        Selection
            Valid until the next call for the same bucket.
        """


def check_ratio(subsystem: str, ratio: object) -> float:
    """Give a kept fraction back as a float, or say why it is none."""
    if isinstance(ratio, (int, float, np.integer, np.floating)) and not isinstance(ratio, bool) and 0 < ratio <= 1:
        return float(ratio)
    raise ConfigurationError(f"{subsystem}: ratio is the kept fraction and must be in (0, 1], got {ratio!r}")


def kept(ratio: float, numel: int) -> int:
    """Give the number of elements that a ratio keeps: the nearest integer, at least 1 where there are any.

    Examples
    --------
    >>> kept(0.01, 1000), kept(0.01, 3), kept(1.0, 7), kept(0.5, 0)
    (10, 1, 7, 0)
    """
    return min(numel, max(1, int(ratio * numel + 0.5)))
