"""A linear learned code: principal components of neighboring values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.device import current_device
from mpicomp.systems.lgc.learned_code import LearnedCode
from mpicomp.workspace import Workspace

_MIN_ENERGY = 1e-12  # of a direction, times the largest one: less is rounding


class LinearCode(LearnedCode):
    """Values are cut into blocks of neighbors, and of each block ``kept`` coordinates travel: those with most energy.

    It is not in the paper of LGC (arXiv 2103.08870): it is what an autoencoder has to beat, with no training loop and
    two kilobytes of weights.

    Values stand for other elements at every step, so places have no directions of their own; what can be learned is
    how neighbors correlate: elements of one row often have the same sign. So all blocks share one basis, the
    eigenvectors of the blocks' second moments over all steps. Moments are about zero and not about the mean: zeros are
    then decoded to zeros, and a code that was learned from large values fits small ones.

    All coordinates but one are those along the leading eigenvectors. The last one is along one of the others, another
    at every step: see `LearnedCode.turn`. Without error feedback that costs a little accuracy. Decoding is linear.

    With a leader, the basis is that of its values, and the decoder of each rank is the linear map of its code that has
    the least squared error for that rank's values.
    """

    def __init__(self, workspace: Workspace, seed: int = 0, block: int = 16, kept: int = 4) -> None:
        super().__init__(workspace, seed)
        self._block = block
        self._kept = kept
        self._turn = 0
        self._moments = np.zeros((block, block))  # of what is coded
        self._crossed = np.zeros((0, block, block))  # of every rank's values with the leader's, where there is one
        self._maps = np.zeros((1, block, block), np.float32)  # the basis, then a decoder for each rank, rows alike
        self._active = np.zeros((1, kept, block), np.float32)  # those of their rows that this step uses
        self._on_device: Any = None  # `_active` on the device of the values

    @property
    def least(self) -> int:
        return self._block

    def length(self, count: int) -> int:
        return -(-count // self._block) * self._kept

    def turn(self, step: int) -> None:
        self._turn = step % (self._block - self._kept + 1)
        self._choose()

    def encode(self, values: NDArray[np.floating], out: NDArray[np.floating]) -> None:
        kernels.encode_blocks(values, self._device_maps()[0], out)

    def decode(self, code: NDArray[np.floating], out: NDArray[np.floating], worker: int = 0) -> None:
        kernels.decode_blocks(code, self._device_maps()[1 + worker], out)

    def decode_near(
        self,
        code: NDArray[np.floating],
        centre: NDArray[np.floating],
        out: NDArray[np.floating],
        out_centre: NDArray[np.floating],
    ) -> None:
        self.decode(code, out)
        self.decode(centre, out_centre)

    def learn(self, values: NDArray[np.floating], leader: int | None = None) -> float:
        # There is a leader at every step, or at none
        whole = np.asarray(values, np.float64)
        source = whole.mean(axis=0) if leader is None else whole[leader]
        targets = source[np.newaxis] if leader is None else whole
        error = self._error(source, targets)
        blocks = self._blocks(source)
        self._moments += blocks.T @ blocks
        if leader is not None:
            if not self._crossed.size:
                self._crossed = np.zeros((len(whole), self._block, self._block))
            for sums, target in zip(self._crossed, targets, strict=True):
                sums += blocks.T @ self._blocks(target)
        self._solve()
        return error

    def size(self, ranks: int) -> int:
        return (1 + ranks) * self._block**2

    def weights(self) -> NDArray[np.float32]:
        # The basis, then the decoders
        return self._maps.reshape(-1).copy()

    def use(self, weights: NDArray[np.float32]) -> None:
        self._maps = np.array(weights, np.float32).reshape(-1, self._block, self._block)
        self._active = np.zeros((len(self._maps), self._kept, self._block), np.float32)
        self._choose()

    def state(self) -> dict[str, Any]:
        return {"moments": self._moments.copy(), "crossed": self._crossed.copy(), "weights": self.weights()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._moments = np.array(state["moments"], np.float64)
        self._crossed = np.array(state["crossed"], np.float64).reshape(-1, self._block, self._block)
        self.use(state["weights"])

    def _blocks(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return blocks, shape (blocks, block); the last one is padded with zeros."""
        blocks = np.zeros((-(-values.size // self._block), self._block))
        blocks.reshape(-1)[: values.size] = values
        return blocks

    def _device_maps(self) -> Any:
        """Return the rows that this step uses, on the current device."""
        if self._on_device is None:
            self._on_device = current_device().to_device(self._active)
        return self._on_device

    def _choose(self) -> None:
        self._on_device = None
        leading = self._kept - 1
        self._active[:, :leading] = self._maps[:, :leading]
        self._active[:, leading] = self._maps[:, leading + self._turn]

    def _error(self, source: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
        """Return the squared error of the decoded values now, as a share of the energy."""
        energy = float(np.square(targets).sum())
        if energy == 0:
            return 0.0
        if len(self._maps) == 1:
            return 1.0  # nothing was learned so far
        code, decoded = np.empty(self.length(source.size)), np.empty(source.size)
        kernels.encode_blocks(source, self._active[0], code)
        error = 0.0
        for active, target in zip(self._active[1:], targets, strict=True):
            kernels.decode_blocks(code, active, decoded)
            error += float(np.square(decoded - target).sum())
        return error / energy

    def _solve(self) -> None:
        """Compute basis and decoders from the moments."""
        energies, vectors = np.linalg.eigh(self._moments)
        basis = vectors.T[::-1]
        decoders = [basis]
        if self._crossed.size:
            # Coordinates along eigenvectors are not correlated: each has a least-squares problem of its own.
            seen = np.where(energies > _MIN_ENERGY * energies[-1], energies, np.inf)[::-1]
            decoders = [(basis @ sums) / seen[:, np.newaxis] for sums in self._crossed]
        self.use(np.stack([basis, *decoders]))
