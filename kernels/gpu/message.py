"""Messages, written by the device in one launch each: the host would have to wait for the numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu.message import HALVES, check_stored
from mpicomp.kernels.gpu.compile import launch, scalar_arg, sweeps, twin_of
from mpicomp.kernels.gpu.workspace import Partials, Verdict, reuse, table_of_rows


# All but ``lead`` may be 0-d device arrays of bool or float64; others are converted, by a launch each. The squared norm
# of values as ``kept`` has the bits of `energy`, and needs no launch.
@twin_of(cpu.write_header)
def write_header(message, lead, finite, energy, kept, rounding):
    blocks, dtype, number = 1, np.dtype(np.float32), 0.0 if kept is None else kept
    values = 0, 0, 0
    if len(getattr(kept, "shape", ())) > 0:
        blocks, dtype, number = sweeps(kept.size, kept.dtype), kept.dtype, 0.0
        values = kept, kept.size, reuse(Partials, blocks, 1).memory
    launch(
        "message", "write_header", dtype, blocks,
        message, _signed(lead), *scalar_arg(finite, np.bool_), *scalar_arg(energy, np.float64),
        int(kept is not None), *scalar_arg(number, np.float64), *values, *scalar_arg(rounding, np.float64),
    )  # fmt: skip


@twin_of(cpu.write_tail)
def write_tail(out, finite, stale, energy, lost):
    flags = *scalar_arg(finite, np.bool_), *scalar_arg(stale, np.bool_)
    sums = *scalar_arg(energy, np.float64), *scalar_arg(lost, np.float64)
    launch("message", "write_tail", out.dtype, 1, out, *flags, *sums)


# One launch for any number of selections. Those of equal length at equal distances are described by a few numbers,
# others by a table that goes to the device.
@twin_of(cpu.sparse_add)
def sparse_add(messages, values_at, indices, indices_at, counts, stored, factor, out):
    return sparse_add_and_subtract(messages, values_at, indices, indices_at, counts, stored, factor, out, None, None)


def sparse_add_and_subtract(
    messages: Any, values_at: Sequence[int], indices: Any, indices_at: Sequence[int], counts: Sequence[int],
    stored: str, factor: Any, out: Any, sent: Any, left: Any,
) -> Any:  # fmt: skip
    """Do `sparse_add`, and subtract the values of a selection, if there is one, from another array at its indices."""
    check_stored("sparse_add", stored, out.dtype)
    if not len(values_at) == len(indices_at) == len(counts):
        raise ValueError(
            f"sparse_add: {len(counts)} selections, with values at {len(values_at)} and indices at {len(indices_at)}"
        )
    values, places, lengths = step_of(values_at), step_of(indices_at), step_of(counts)
    table = 0
    if values is None or places is None or lengths is None or lengths[1] != 0:
        table = table_of_rows(np.array([values_at, indices_at, counts]).T)
        values = places = lengths = 0, 0
    verdict = reuse(Verdict)
    subtracted = (0, 0, 0, 0) if sent is None else (sent.indices, sent.values, sent.indices.size, left)
    launch(
        "message", f"sparse_add_{stored}" if stored in HALVES else "sparse_add", out.dtype, sweeps(out.size, out.dtype),
        messages, indices, len(counts), *values, *places, lengths[0], table, *scalar_arg(factor, np.float64),
        out, out.size, verdict.memory, *subtracted,
    )  # fmt: skip
    return verdict.good()


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


def step_of(numbers: Sequence[int]) -> tuple[int, int] | None:
    """Return the first number and the distance to the next one, or None where distances differ."""
    if len(numbers) == 0:
        return 0, 0
    first, step = int(numbers[0]), int(numbers[1]) - int(numbers[0]) if len(numbers) > 1 else 0
    even = all(number == first + place * step for place, number in enumerate(numbers))
    return (first, step) if even else None
