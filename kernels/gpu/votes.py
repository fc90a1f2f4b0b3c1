"""Signs as votes: the majority of ranks for each element."""

from typing import Any

import numpy as np
from mpicomp.kernels.gpu.compile import launch, strides


def pack_votes(array: Any, words: Any) -> None:
    """Reduce an array to its signs; see `mpicomp.kernels.cpu.pack_votes`."""
    launch("votes", "pack_votes", array.dtype, strides(64 * words.size), array, array.size, words, 2 * words.size)


def majority(votes: Any, out: Any) -> None:
    """Write the signs that more than half of the ranks have voted for; see `mpicomp.kernels.cpu.majority`.

    ``votes`` is contiguous.
    """
    launch("votes", "majority", np.float32, strides(out.size), votes, votes.size // max(1, out.size), out, out.size)


def unpack_votes(words: Any, value: float, out: Any) -> None:
    """Write ``value`` with the signs; see `mpicomp.kernels.cpu.unpack_votes`."""
    launch("votes", "unpack_votes", out.dtype, strides(out.size), words, float(value), out, out.size)
