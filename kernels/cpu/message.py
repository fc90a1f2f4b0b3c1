"""Messages: the header before the payload, the numbers after an array, and the sum of several selections.

On a device the numbers are known there alone, and `mpicomp.kernels.gpu` writes them without a wait.
"""

import struct
from collections.abc import Sequence

import numpy as np
from mpicomp.kernels.cpu.cast import widen
from mpicomp.kernels.cpu.compile import Bytes, Floats, Indices, exact, kernel
from mpicomp.kernels.cpu.elementwise import energy as energy_of
from mpicomp.kernels.cpu.indices import ascending_below
from mpicomp.kernels.cpu.scatter import add_ascending
from numpy.typing import NDArray

NONFINITE = 1 << 8  # the bit of the first word
HALVES = ("fp16", "bf16")

_HEADER = struct.Struct("<Qdd")
_FAR_BELOW = 1e38  # the largest float32
_DTYPES = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}


def write_header(
    message: Bytes, lead: int, finite: bool, energy: float, kept: float | Floats | None, rounding: float
) -> None:
    """Fill the first 24 bytes of a message: its form, its energy, and the energy that it lacks.

    ``lead`` is the first word; its bit 8 is also set where the gradient is not ``finite``. ``energy`` is the squared L2
    norm of the gradient. ``kept`` is that of the sent part, or its values, whose norm is then computed as `energy`
    does; the difference is lost, if it is positive, and nothing with None. ``rounding`` is lost in addition.
    """
    left = 0.0
    if kept is not None:
        left = float(energy) - (energy_of(kept) if isinstance(kept, np.ndarray) and kept.ndim else float(kept))
    word = (lead | (0 if finite else NONFINITE)) % 2**64
    _HEADER.pack_into(message.data, 0, word, energy, (0.0 if left < 0 else left) + float(rounding))


def write_tail(out: Floats, finite: bool, stale: bool, energy: float, lost: float) -> None:
    """Write ``(not finite, stale, energy, lost)`` as numbers that ranks can add up.

    Numbers beyond float32 become infinite.
    """
    if max(energy, lost) < _FAR_BELOW:
        out[:] = not finite, stale, energy, lost
    else:
        with np.errstate(over="ignore"):
            out[:] = not finite, stale, energy, lost


def sparse_add(
    messages: Bytes,
    values_at: Sequence[int],
    indices: NDArray[np.unsignedinteger],
    indices_at: Sequence[int],
    counts: Sequence[int],
    stored: str,
    factor: float,
    out: Floats,
) -> bool:
    """Add ``factor`` times each of several selections to ``out``, in their order.

    Selection r has ``counts[r]`` values from byte ``values_at[r]`` of ``messages`` on, stored in the dtype of ``out``
    or as "fp16" or "bf16", and uint32 indices from byte ``indices_at[r]`` of ``indices`` on, which may be ``messages``.
    The factor is rounded to the dtype of ``out``, and the product before it is added. Return False where indices do not
    ascend without repetition below n; ``out`` is then undefined.
    """
    if stored not in HALVES and _DTYPES.get(stored) != out.dtype:
        check_stored("sparse_add", stored, out.dtype)
    where, dtype = indices.view(np.uint8), out.dtype
    by = dtype.type(factor)
    for value_at, index_at, count in zip(values_at, indices_at, counts, strict=True):
        chosen = where[index_at : index_at + 4 * count].view(np.uint32)
        if stored in HALVES:
            values = np.empty(count, dtype)
            widen(messages[value_at : value_at + 2 * count].view(np.uint16), stored, values)
        else:
            values = messages[value_at : value_at + dtype.itemsize * count].view(dtype)
        if not add_ascending(chosen, values, by, out):
            return False
    return True


@kernel
def write_pairs_plain(values: Floats, indices: Indices, values_out: Floats, indices_out: Indices) -> float:
    """Copy a selection to its places in a message, and return the squared L2 norm of the values as `energy` does."""
    for j in range(indices.size):
        values_out[j] = values[j]
        indices_out[j] = indices[j]
    return energy_of(values)


@kernel
def ascending_parts(words: Indices, starts: NDArray[np.int64], counts: NDArray[np.int64], numel: int) -> int:
    """Return how many of several parts of an array ascend without repetition below ``numel``, up to one that does not.

    Part r has ``counts[r]`` indices from ``starts[r]`` on.
    """
    for part in range(starts.size):
        if not ascending_below(words[starts[part] : starts[part] + counts[part]], numel):
            return part
    return starts.size


def mean_of_pairs(
    received: Bytes, values_at: NDArray[np.int64], indices_at: NDArray[np.int64], counts: NDArray[np.int64], out: Floats
) -> None:
    """Write the mean of selections to ``out``, in their order, whose indices were checked by `ascending_parts`.

    Selection r has ``counts[r]`` values from element ``values_at[r]`` of ``received`` on, seen as the dtype of ``out``,
    and indices from element ``indices_at[r]`` on, seen as uint32. Rounded as by `sparse_add`.
    """
    _mean_of_pairs(received.view(out.dtype), values_at, received.view(np.uint32), indices_at, counts, out)


@exact  # every rank adds up the mean for itself
def _mean_of_pairs(values, values_at, indices, indices_at, counts, out):  # type: ignore[no-untyped-def]
    factor = out.dtype.type(1 / counts.size)
    out[:] = 0
    for part in range(counts.size):
        value, index = values_at[part], indices_at[part]
        for j in range(counts[part]):
            out[indices[index + j]] += factor * values[value + j]


def check_stored(name: str, stored: str, dtype: np.dtype[np.floating]) -> None:
    """Refuse values of another dtype than that of the array that they are added to, unless they have 16 bits."""
    if stored not in HALVES and _DTYPES.get(stored) != dtype:
        raise ValueError(f"{name}: values must be stored as {dtype.name}, fp16 or bf16, got {stored!r}")
