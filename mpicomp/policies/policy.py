"""What a policy is: it says which scheme each bucket uses in a step."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Scheme
from mpicomp.cost import CostModel, Prediction
from mpicomp.transport.base import Asked, Transport


@dataclass(frozen=True)
class Plan:
    """A scheme for one bucket in one step.

    Parameters
    ----------
    scheme : Scheme
        A compressor bound to a collective.
    reason : str
        Why it was taken.
    prediction : Prediction or None
        What it is expected to take, if anything is.
    settled : bool
        Whether it was run for some steps before: what comes before that tells nothing of what it takes.
    """

    scheme: Scheme[Any]
    reason: str
    prediction: Prediction | None = None
    settled: bool = True


@dataclass(frozen=True)
class Shape:
    """A bucket: names, lengths and shapes of its parameters, and the dtype in which they are exchanged."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(self.sizes)


class Policy(ABC):
    """Chooses plans, the same on all ranks."""

    id: str

    cost: CostModel | None = None
    """What it predicts seconds with."""

    @property
    def measures(self) -> bool:
        """Whether it wants to learn what steps took."""
        return False

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Generator[Asked, Any, None]:
        """Take up new buckets. Collective over all ranks, as rounds."""
        return
        yield

    def refresh(self, transport: Transport) -> Generator[Asked, Any, None]:
        """Do what has to be done before this step's plans. Collective, as rounds; mostly there are none."""
        return
        yield

    @abstractmethod
    def plan(self, bucket: int) -> Plan:
        """Give a bucket's plan for this step."""

    def state_dict(self) -> dict[str, Any]:
        """Give what has to survive a restart, JSON-able; not the cost model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:  # noqa: B027, most have none
        """Take up what `state_dict` gave, and a cost model where there is one. Not collective."""

    def learn(self, plans: Sequence[Plan], times: NDArray[np.float64]) -> None:  # noqa: B027, most have nothing to learn
        """Learn what a step took.

        Parameters
        ----------
        plans : sequence of Plan
            Of its buckets.
        times : array of float64, shape (ranks, buckets, 3)
            Start and end of each bucket's exchange on the clock that ranks share, and the seconds of own work in it.
        """
