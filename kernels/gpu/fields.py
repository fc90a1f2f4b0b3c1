"""Integers in fields of 64-bit words, wide enough that sums over ranks stay in their fields."""

from typing import Any

import numpy as np
from mpicomp.kernels.cpu.random import halves
from mpicomp.kernels.gpu.compile import launch, strides
from mpicomp.kernels.gpu.reduce import Partials
from mpicomp.kernels.sizes import fields_of, width_of


def pack_fields(
    array: Any, inverses: Any, steps: Any, limit: int, largest: int, key: int | None, words: Any, sent: Any,
    levels: Any = None,
) -> Any:  # fmt: skip
    """Round an array to integers and pack them; see `mpicomp.kernels.cpu.pack_fields`.

    ``inverses`` and ``steps`` are device arrays, as all others.
    """
    blocks = strides(words.size)
    partials = Partials(blocks, 1)
    low, high = (0, 0) if key is None else map(int, halves(key))
    launch(
        "fields", "pack_fields", array.dtype, blocks,
        array, array.size, 0 if levels is None else levels, inverses, steps, limit, fields_of(largest),
        width_of(largest), int(key is not None), low, high, words, words.size, sent, partials.memory,
    )  # fmt: skip
    return partials.total(0)


def unpack_fields(words: Any, factors: Any, offset: int, largest: int, out: Any, levels: Any = None) -> None:
    """Write ``(field - offset) * factor`` for each element; see `mpicomp.kernels.cpu.unpack_fields`."""
    launch(
        "fields", "unpack_fields", out.dtype, strides(words.size),
        words, words.size, 0 if levels is None else levels, factors, offset, fields_of(largest), width_of(largest), out,
        out.size,
    )  # fmt: skip


def pack_objections(array: Any, inverse: Any, limit: int, ranks: int, words: Any) -> None:
    """Mark elements beyond the ends of a grid; see `mpicomp.kernels.cpu.pack_objections`."""
    launch(
        "fields", "pack_objections", array.dtype, strides(words.size),
        array, array.size, float(inverse), limit, fields_of(ranks), width_of(ranks), words, words.size,
    )  # fmt: skip


def settle_levels(words: Any, ranks: int, level: int, levels: Any) -> None:
    """Set the level where nobody has objected; see `mpicomp.kernels.cpu.settle_levels`."""
    launch(
        "fields", "settle_levels", np.float32, strides(words.size),
        words, words.size, fields_of(ranks), width_of(ranks), level, levels, levels.size,
    )  # fmt: skip
