"""Messages: the words that stand before the payload of one, the numbers behind an array, and what selections add up to.

What the host writes into messages it would have to wait for; here the device does, in one launch each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels.cpu.message import HALVES, check_stored
from mpicomp.kernels.gpu.bits import given
from mpicomp.kernels.gpu.compile import launch, library, strides, sweeps
from mpicomp.kernels.gpu.reduce import kept_partials


def write_header(message: Any, lead: int, finite: Any, energy: Any, kept: Any, rounding: Any) -> None:
    """Fill the first 24 bytes of a message; see `mpicomp.kernels.cpu.write_header`.

    All but ``lead`` may be 0-d device arrays: of bool, and of float64. Others are converted, by a launch each. Of
    values as ``kept`` the squared norm has the bits that `mpicomp.kernels.gpu.energy` gives, and no launch of its own.
    """
    blocks, dtype, number = 1, np.dtype(np.float32), 0.0 if kept is None else kept
    values: tuple[Any, int, Any] = (0, 0, 0)
    if len(getattr(kept, "shape", ())) > 0:
        blocks, dtype, number = sweeps(kept.size, kept.dtype), kept.dtype, 0.0
        values = kept, kept.size, kept_partials().memory
    launch(
        "message", "write_header", dtype, blocks,
        message, _signed(lead), *given(finite, np.bool_), *given(energy, np.float64),
        int(kept is not None), *given(number, np.float64), *values, *given(rounding, np.float64),
    )  # fmt: skip


def write_pairs(message: Any, lead: int, finite: Any, energy: Any, values: Any, indices: Any, middle: int) -> None:
    """Write a message of values and indices as they are in one launch: header, both, and zeros between and behind them.

    Parameters
    ----------
    message : device array of uint8
        Aligned to 8 bytes.
    lead, finite, energy
        As in `write_header`, which gives the same bits where ``kept`` is ``values``.
    values, indices : device arrays, shape (k,)
        Of float32 or float64, and of uint32.
    middle : int
        Byte at which the indices begin.
    """
    # More than a sum needs, so that copies of a few elements a thread take no longer than the first of them to arrive.
    blocks, dtype = strides(values.size), values.dtype
    launch(
        "message", "write_pairs", dtype, blocks,
        message, _signed(lead), *given(finite, np.bool_), *given(energy, np.float64),
        values, indices, values.size, middle, kept_partials().memory,
    )  # fmt: skip


def write_tail(out: Any, finite: Any, stale: Any, energy: Any, lost: Any) -> None:
    """Write ``(not finite, stale, energy, lost)`` as numbers; see `mpicomp.kernels.cpu.write_tail`.

    All may be 0-d device arrays, as in `write_header`.
    """
    launch(
        "message", "write_tail", out.dtype, 1,
        out, *given(finite, np.bool_), *given(stale, np.bool_), *given(energy, np.float64), *given(lost, np.float64),
    )  # fmt: skip


def sparse_add(
    messages: Any,
    values_at: Sequence[int],
    indices: Any,
    indices_at: Sequence[int],
    counts: Sequence[int],
    stored: str,
    factor: Any,
    out: Any,
    right: Any = True,
) -> Any:
    """Add ``factor`` times each of several selections to ``out``, in the order given.

    See `mpicomp.kernels.cpu.sparse_add`; the result is a 0-d device array, and ``right`` may be one of bool. A memset
    and one launch for any number of selections: an element's sum is made by one thread, that of the first selection
    which has it and which looks for it in the others. Where selections are equally long and equally far apart, they are
    told by a few numbers, otherwise a table goes to the device.
    """
    check_stored("sparse_add", stored, out.dtype)
    if not len(values_at) == len(indices_at) == len(counts):
        raise ValueError(
            f"sparse_add: {len(counts)} selections, with values at {len(values_at)} and indices at {len(indices_at)}"
        )
    values, places, lengths = steps_of(values_at), steps_of(indices_at), steps_of(counts)
    table: Any = 0
    if values is None or places is None or lengths is None or lengths[1] != 0:
        table = library().asarray(np.array([values_at, indices_at, counts], np.int64).T.copy())
        values = places = lengths = 0, 0
    total = int(sum(counts))
    memory = library().zeros(3, np.uint64)
    launch(
        "message", f"sparse_add_{stored}" if stored in HALVES else "sparse_add", out.dtype, strides(total),
        messages, indices, len(counts), *values, *places, lengths[0], table, total, *given(factor, np.float64),
        out, out.size, *given(right, np.bool_), memory,
    )  # fmt: skip
    return memory[2:].view(np.bool_)[0]


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


def steps_of(numbers: Sequence[int]) -> tuple[int, int] | None:
    """Return the first number and the distance to the next one, or None where distances differ."""
    if len(numbers) == 0:
        return 0, 0
    first, step = int(numbers[0]), int(numbers[1]) - int(numbers[0]) if len(numbers) > 1 else 0
    even = all(number == first + place * step for place, number in enumerate(numbers))
    return (first, step) if even else None
