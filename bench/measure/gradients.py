"""Gradients to measure with: as good as fresh at every call, and with residuals in their steady state."""

from typing import Any

import numpy as np
from mpicomp.bench.measure.feedback import Selecting, make_bucket
from numpy.typing import NDArray

from mpicomp.compressors import Compressor, Quantiser, SharedSparsifier, Sparsifier
from mpicomp.places import HOST, Place
from mpicomp.reducer.bucket import Bucket

POOL = 2
"""Arrays that gradients are cut from."""

_SLACK = 1 << 20  # elements by which the random array is longer than a gradient, which begins anywhere in them
_TURNOVERS = 2  # turnovers of the residual, each of 1 / ratio steps: its spread stays the same from the first on
_MOST_STEPS = 5000  # steps, at most, in which a residual comes to its steady state


class Gradients:
    """Laplace-distributed arrays that are as good as fresh: each is a random part of a longer one."""

    def __init__(self, numel: int, seed: int = 0, place: Place = HOST) -> None:
        self.numel = numel
        self.place = place
        self._random = np.random.default_rng(seed)
        self._pool = [place.bring(self._laplace(numel + min(numel, _SLACK) + 64)) for _ in range(POOL)]
        place.wait()  # whoever uses them may do so in another stream

    def fresh(self) -> Any:
        """Return a gradient; not to be written to."""
        array = self._pool[self._random.integers(POOL)]
        start = int(self._random.integers((array.size - self.numel) // 16)) * 16  # where a cache line begins
        return array[start : start + self.numel]

    def _laplace(self, size: int) -> NDArray[np.float32]:
        array = np.empty(size, np.float32)
        for start in range(0, size, 1 << 20):  # by pieces: what is taken away needs memory too
            part = array[start : start + (1 << 20)]
            self._random.standard_exponential(out=part, dtype=np.float32)
            part -= self._random.standard_exponential(part.size, dtype=np.float32)
        return array


def steps_to_settle(compressor: Compressor) -> int:
    """Return the number of steps after which a residual is in its steady state."""
    return min(_MOST_STEPS, int(_TURNOVERS / getattr(compressor, "ratio", 0.01)) + 1)


class Settled:
    """Error feedback on a short array that has reached its steady state, where thresholds do not rise any more.

    A long array's residual is like the short one's, repeated. That is how a compressor gets its own steady state, which
    is far away (in ``1 / ratio`` steps every element is sent once), and how it keeps it while others take their turns.
    """

    def __init__(self, compressor: Sparsifier | SharedSparsifier | Quantiser, gradients: Gradients) -> None:
        self._gradients = gradients
        self._bucket = make_bucket(gradients.numel, compressor, compressor.feedback)
        self._selecting = Selecting(compressor, gradients.numel)
        for _ in range(steps_to_settle(compressor)):
            self.advance()

    def advance(self) -> None:
        """Do one more step: some compressors swing between too much and too little."""
        self._selecting.step(self._bucket, self._gradients.fresh(), message=False)

    def give(self, bucket: Bucket, shift: int = 0) -> None:
        """Make the residual of a long array like this one's, which may begin elsewhere."""
        for (_, own), (_, residual) in zip(self._bucket.residuals(), bucket.residuals(), strict=True):
            if own.size:
                tile = np.roll(own, shift)
                whole = residual.size - residual.size % tile.size
                residual[:whole].reshape(-1, tile.size)[:] = tile
                residual[whole:] = tile[: residual.size - whole]
