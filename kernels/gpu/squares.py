"""A few bits an element: its sign, and one of the levels of its block, which lie apart like the squares of integers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.squares import check_places, split_of
from mpicomp.kernels.gpu.compile import launch, library, strides
from mpicomp.kernels.gpu.message import steps_of
from mpicomp.kernels.gpu.reduce import Partials
from mpicomp.kernels.sizes import SQUARES_BLOCK


def pack_squares(array: Any, bits: int, out: Any, sent: Any) -> Any:
    """Round each magnitude to the nearest level of its block; see `mpicomp.kernels.cpu.pack_squares`.

    Means are summed in another order than there: a base or a step may differ in its last bit, which travels with the
    codes.
    """
    split = split_of(out.size, array.size, bits)
    blocks = strides(array.size)  # of threads, as many as a block of elements has
    partials = Partials(blocks, 1)
    launch(
        "squares", "pack_squares", array.dtype, blocks,
        array, array.size, bits, out, split // 4, out[split:], -(-array.size // SQUARES_BLOCK), sent, partials.memory,
    )  # fmt: skip
    return partials.total(0)


def unpack_squares(messages: Any, starts: Sequence[int], counts: Sequence[int], bits: int, out: Any) -> Any:
    """Read what was packed several times, in a memset and one launch; see `mpicomp.kernels.cpu.unpack_squares`.

    What is equally long and equally far apart is told by a few numbers, otherwise a table goes to the device.

    Returns
    -------
    0-d device array of bool
        False where a base, a step or a last level is not what it has to be.
    """
    check_places("unpack_squares", messages.size, starts, counts, bits, out.size)
    places, lengths = steps_of(starts), steps_of(counts)
    table: Any = 0
    if places is None or lengths is None or lengths[1] != 0:
        table = library().asarray(np.array([starts, counts], np.int64).T.copy())
        places = lengths = 0, 0
    memory = library().zeros(3, np.uint64)
    launch(
        "squares", "unpack_squares", out.dtype, strides(out.size),
        messages, *places, lengths[0], table, bits, out, out.size, memory,
    )  # fmt: skip
    return memory[2:].view(np.bool_)[0]
