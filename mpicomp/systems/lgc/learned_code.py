"""The base class of learned codes: encode a vector of values to a shorter one, decode it, and learn to do so."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.workspace import Workspace


class LearnedCode(ABC):
    """Turns values into a code that ranks can average, and a code into values.

    Values are ``count`` numbers of float32 or float64, scaled so that their mean square is about 1; at every step they
    stand for other elements of the same layers, in the same order of layers and ascending by index within each. Codes
    have the values' dtype. ``count`` is the same at every call.

    `encode`, `decode` and `decode_near` are part of every step: they allocate nothing, need no torch, return the same
    bits for the same input on every processor (kernels of `mpicomp.kernels.cpu.compile.exact`), and map infinity and
    NaN to infinity or NaN. Their arrays are those of `mpicomp.device.current_device`; weights and states are on the
    host.
    """

    def __init__(self, workspace: Workspace, seed: int = 0) -> None:
        self.workspace = workspace
        self.seed = seed

    @property
    @abstractmethod
    def least(self) -> int:
        """Fewest values that it can code."""

    @abstractmethod
    def length(self, count: int) -> int:
        """Return the number of numbers in the code of ``count`` values."""

    def turn(self, step: int) -> None:  # noqa: B027, a code may be the same at every step
        """Announce the step whose values come next, the same on all ranks, before its first `encode` or `decode`.

        A linear code that never changes leaves the same directions out at every step. With error feedback they pile up
        in the residuals until little else is selected; a code that takes turns with them sends each sooner or later.
        """

    @abstractmethod
    def encode(self, values: NDArray[np.floating], out: NDArray[np.floating]) -> None:
        """Write the code of values, shape (count,), to ``out``, shape (length(count),)."""

    @abstractmethod
    def decode(self, code: NDArray[np.floating], out: NDArray[np.floating], worker: int = 0) -> None:
        """Write the values of a code to ``out``; with a decoder for each rank, those of rank ``worker``."""

    @abstractmethod
    def decode_near(
        self,
        code: NDArray[np.floating],
        centre: NDArray[np.floating],
        out: NDArray[np.floating],
        out_centre: NDArray[np.floating],
    ) -> None:
        """Decode the mean of all codes, ``centre``, and this rank's code by the affine map that `decode` is around it.

        So the mean of ``out`` over ranks is ``out_centre``, which equals the result of `decode` bit for bit.
        """

    @abstractmethod
    def learn(self, values: NDArray[np.floating], leader: int | None = None) -> float:
        """Learn from one step's values, finite, shape (ranks, count). On one rank; may allocate, and may use torch.

        Without a leader the mean of all codes is decoded to the mean of all values; with one, the leader's code to
        every rank's values, by the decoder of each. Return the squared error before learning, as a share of the energy
        of the values: 1 is that of zeros; 0 if there was no energy.
        """

    @abstractmethod
    def size(self, ranks: int) -> int:
        """Return the number of weights, the size of `weights`; ``ranks`` decoders where each has its own."""

    @abstractmethod
    def weights(self) -> NDArray[np.float32]:
        """Return the weights that `encode` and `decode` need, shape (size,), for one broadcast. Only after `learn`."""

    @abstractmethod
    def use(self, weights: NDArray[np.float32]) -> None:
        """Load the weights that `weights` returned, on this rank or another one."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all that `learn` needs to continue as if it had never stopped: numbers and arrays, copied, by name."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned. The arrays stay the caller's."""
