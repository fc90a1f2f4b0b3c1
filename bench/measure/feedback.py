"""Error feedback by itself: one rank's bucket and compressor, without an exchange."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.arrays import ArraySpec
from mpicomp.compressors import Accumulated, Compressor, Context, Quantiser, Selection, Sparsifier
from mpicomp.compressors.wire import STALE, Wire, sparse_bytes, write_sparse
from mpicomp.gpu import HOST, Device
from mpicomp.reducer.bucket import Bucket

DTYPE = np.dtype(np.float32)

_PLAIN = Wire()


def make_bucket(numel: int, compressor: Compressor, feedback: bool, threads: int = 1, device: Device = HOST) -> Bucket:
    """Make a bucket of one array on a device, with the compressor's momentum before the sum."""
    return Bucket(0, [ArraySpec("gradient", DTYPE.name, (numel,))], feedback, compressor.entry, threads, device)


@dataclass
class Selecting:
    """A compressor at work on one array, step after step, with its memory and its arrays."""

    compressor: Sparsifier | Quantiser  # selects elements, or packs all
    numel: int  # length of the array
    # Its workspace is where the array is; that device is current while a step is done
    context: Context = field(default_factory=Context)
    finite: bool = False  # whether gradients are known to be finite: then no check is waited for

    def __post_init__(self) -> None:
        compressor = self.compressor.bind(["gradient"], [self.numel])
        assert isinstance(compressor, Sparsifier | Quantiser)
        self.compressor = compressor

    def step(self, bucket: Bucket, gradient: NDArray[np.floating], message: bool) -> int:
        """Do the work of a step before and after its exchange, and return the number of elements that are sent."""
        accumulated = bucket.accumulate([gradient])
        accumulated.may_be_overwritten = True
        if isinstance(self.compressor, Quantiser):
            sent: NDArray[np.floating] | Selection = self._pack(self.compressor, accumulated)
            count = self.numel
        else:
            sent = self._select(self.compressor, accumulated, message)
            count = int(sent.indices.size)
        bucket.keep(sent, self.finite or accumulated.finite)
        self.context.step += 1
        return count

    def _pack(self, compressor: Quantiser, accumulated: Accumulated) -> NDArray[np.floating]:
        message = self.context.workspace.array("packed", compressor.packed_bytes(self.numel), np.uint8)
        key = self.context.key(shared=False)
        if compressor.packs_in_place and accumulated.overwrite("residual"):
            compressor.pack_in_place(accumulated, slice(0, self.numel), message, key)
            return accumulated.array()
        sent = self.context.workspace.array("sent", self.numel, accumulated.dtype)
        compressor.pack(accumulated.array(), message, sent, key)
        return sent

    def _select(self, compressor: Sparsifier, accumulated: Accumulated, message: bool) -> Selection:
        context = self.context
        selection = compressor.select(accumulated, context)
        if message and not compressor.shares_positions:
            if compressor.wire is not None and np.may_share_memory(selection.values, accumulated.array()):
                selection = Selection(selection.indices, selection.values.copy())  # rounded in place
            write_plain(selection, accumulated, context, Wire(compressor.wire))
        return selection


def write_plain(
    selection: Selection, accumulated: Accumulated, context: Context, wire: Wire = _PLAIN
) -> NDArray[np.uint8]:
    """Write the message of a selection into the workspace, as plain 32-bit pairs by default."""
    numel, dtype = accumulated.numel, accumulated.dtype
    out = context.workspace.array("message", sparse_bytes(selection.indices.size, numel, dtype, wire), np.uint8)
    flags, moments = STALE * accumulated.stale, accumulated.device_moments
    kept = selection.values if wire.values is None else kernels.energy(selection.values)
    write_sparse(out, selection, numel, wire, flags, moments.energy, kept, moments.finite)
    return out


POOL = 2  # arrays that gradients are cut from

_SLACK_NUMEL = 1 << 20  # elements by which the random array is longer than a gradient, which begins anywhere in them
_TURNOVERS = 2  # turnovers of the residual, each of 1 / ratio steps: its spread stays the same from the first on
_MAX_STEPS = 5000  # steps, at most, until a residual is in its steady state


class Gradients:
    """Laplace-distributed arrays that are as good as fresh: each is a random part of a longer one."""

    def __init__(self, numel: int, seed: int = 0, device: Device = HOST) -> None:
        self.numel = numel
        self.device = device
        self._random = np.random.default_rng(seed)
        self._pool = [device.to_device(self._laplace(numel + min(numel, _SLACK_NUMEL) + 64)) for _ in range(POOL)]
        device.wait()  # the caller may use them in another stream

    def fresh(self) -> Any:
        """Return a gradient; not to be written to."""
        array = self._pool[self._random.integers(POOL)]
        start = int(self._random.integers((array.size - self.numel) // 16)) * 16  # where a cache line begins
        return array[start : start + self.numel]

    def _laplace(self, size: int) -> NDArray[np.float32]:
        array = np.empty(size, np.float32)
        for start in range(0, size, 1 << 20):  # by pieces: the subtracted array needs memory too
            part = array[start : start + (1 << 20)]
            self._random.standard_exponential(out=part, dtype=np.float32)
            part -= self._random.standard_exponential(part.size, dtype=np.float32)
        return array


def steps_to_settle(compressor: Compressor) -> int:
    """Return the number of steps after which a residual is in its steady state."""
    return min(_MAX_STEPS, int(_TURNOVERS / getattr(compressor, "ratio", 0.01)) + 1)


class Settled:
    """Error feedback on a short array that has reached its steady state, where thresholds do not rise any more.

    A long array's residual is like the short one's, repeated: the steady state is ``1 / ratio`` steps away.
    """

    def __init__(self, compressor: Sparsifier | Quantiser, gradients: Gradients) -> None:
        self._gradients = gradients
        self._bucket = make_bucket(gradients.numel, compressor, compressor.feedback)
        self._selecting = Selecting(compressor, gradients.numel)
        for _ in range(steps_to_settle(compressor)):
            self.advance()

    def advance(self) -> None:
        """Do one more step: some compressors swing between too much and too little."""
        self._selecting.step(self._bucket, self._gradients.fresh(), message=False)

    def fill(self, bucket: Bucket, shift: int = 0) -> None:
        """Make the residual of a long array like this one's, which may begin elsewhere."""
        if not bucket.feedback:
            return
        for (_, settled), (_, residual) in zip(self._bucket.residuals(), bucket.residuals(), strict=True):
            tile = np.roll(settled, shift)
            whole = residual.size - residual.size % tile.size
            residual[:whole].reshape(-1, tile.size)[:] = tile
            residual[whole:] = tile[: residual.size - whole]
