"""Error feedback by itself: one rank's bucket and compressor, without an exchange."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.arrays import Described
from mpicomp.compressors import Accumulated, Compressor, Context, Quantiser, Selection, SharedSparsifier, Sparsifier
from mpicomp.compressors.message import STALE, message_bytes, write_message
from mpicomp.compressors.wire import Wire
from mpicomp.places import HOST, Place
from mpicomp.reducer.bucket import Bucket

DTYPE = np.dtype(np.float32)

_PLAIN = Wire()


def make_bucket(numel: int, compressor: Compressor, feedback: bool, threads: int = 1, place: Place = HOST) -> Bucket:
    """Make a bucket of one array at a place, with the compressor's momentum before the sum."""
    return Bucket(0, [Described("gradient", DTYPE.name, (numel,))], feedback, compressor.entry, threads, place)


@dataclass
class Selecting:
    """A compressor at work on one array, step after step, with its memory and its arrays."""

    compressor: Sparsifier | SharedSparsifier | Quantiser  # what selects, or packs
    numel: int  # length of the array
    # Its workspace is where the array is; that place is current while a step is done
    context: Context = field(default_factory=Context)
    finite: bool = False  # whether gradients are known to be finite: then nobody waits to be told

    def __post_init__(self) -> None:
        compressor = self.compressor.bind(["gradient"], [self.numel])
        assert isinstance(compressor, Sparsifier | SharedSparsifier | Quantiser)
        self.compressor = compressor

    def step(self, bucket: Bucket, gradient: NDArray[np.floating], message: bool) -> int:
        """Do the work of a step before and after its exchange, and return the number of elements that are sent."""
        accumulated = bucket.accumulate([gradient])
        if isinstance(self.compressor, Quantiser):
            sent: NDArray[np.floating] | Selection = self._pack(self.compressor, accumulated)
            count = self.numel
        else:
            sent = self._select(self.compressor, accumulated, message)
            count = int(sent.indices.size)
        bucket.commit(sent, self.finite or accumulated.finite)
        self.context.step += 1
        return count

    def _pack(self, compressor: Quantiser, accumulated: Accumulated) -> NDArray[np.floating]:
        message = self.context.workspace.array("packed", compressor.packed_bytes(self.numel), np.uint8)
        sent = self.context.workspace.array("sent", self.numel, accumulated.dtype)
        compressor.pack(accumulated.array(), message, sent, self.context.key(shared=False))
        return sent

    def _select(self, compressor: Sparsifier | SharedSparsifier, accumulated: Accumulated, message: bool) -> Selection:
        context = self.context
        if isinstance(compressor, SharedSparsifier):
            count = compressor.count(self.numel)
            indices = context.workspace.array("indices", count, np.uint32)
            compressor.positions(self.numel, context, indices)
            values = context.workspace.array("values", count, accumulated.dtype)
            kernels.gather(accumulated.array(), indices, values)
            return Selection(indices, values)
        selection = compressor.select(accumulated, context)
        if message:
            if compressor.wire is not None and np.may_share_memory(selection.values, accumulated.array()):
                selection = Selection(selection.indices, selection.values.copy())  # rounded in place
            write_plain(selection, accumulated, context, Wire(compressor.wire))
        return selection


def write_plain(
    selection: Selection, accumulated: Accumulated, context: Context, wire: Wire = _PLAIN
) -> NDArray[np.uint8]:
    """Write the message of a selection into the workspace, as plain 32-bit pairs if not said otherwise."""
    numel, dtype = accumulated.numel, accumulated.dtype
    out = context.workspace.array("message", message_bytes(selection.indices.size, numel, dtype, wire), np.uint8)
    flags, moments = STALE * accumulated.stale, accumulated.untold
    kept = selection.values if wire.values is None else kernels.energy(selection.values)
    write_message(out, selection, numel, wire, flags, moments.energy, kept, moments.finite)
    return out
