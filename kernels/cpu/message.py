"""Messages: the words that stand before the payload of one, the numbers behind an array, and what selections add up to.

What is written here are numbers that a device knows and the host does not: `mpicomp.kernels.gpu` writes them without
anybody waiting for them.
"""

import contextlib
import struct
from collections.abc import Sequence

import numpy as np
from mpicomp.kernels.cpu.cast import widen
from mpicomp.kernels.cpu.indices import ascending_below
from mpicomp.kernels.cpu.scatter import scatter_add
from mpicomp.kernels.cpu.sweep import energy as energy_of
from numpy.typing import NDArray

NONFINITE = 1 << 8  # the bit of the first word
HALVES = ("fp16", "bf16")

_HEADER = struct.Struct("<Qdd")
_FAR_BELOW = 1e38  # the largest float32
_DTYPES = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}


def write_header(
    message: NDArray[np.uint8],
    lead: int,
    finite: bool,
    energy: float,
    kept: float | NDArray[np.floating] | None,
    rounding: float,
) -> None:
    """Fill the first 24 bytes of a message: what it is, its energy, and the energy of what it leaves out.

    Parameters
    ----------
    message : array of uint8
        Aligned like uint64.
    lead : int
        The first word, of 64 bits. Bit 8 is set as well where ``finite`` is false.
    finite : bool
        Whether all elements of the gradient are finite numbers.
    energy : float
        Squared L2 norm of the gradient.
    kept : float, array or None
        That of what is sent, or the values themselves, whose squared norm is then made as
        `mpicomp.kernels.cpu.energy` makes it. The difference, or 0 where it is negative, is lost; nothing of it with
        None.
    rounding : float
        What is lost besides.

    Examples
    --------
    >>> import numpy as np
    >>> message = np.zeros(24, np.uint8)
    >>> write_header(message, 1, True, 5.0, 3.0, 0.25)
    >>> int(message.view(np.uint64)[0]), message[8:].view(np.float64).tolist()
    (1, [5.0, 2.25])
    >>> write_header(message, 1, True, 5.0, np.array([1, 1], np.float32), 0.25)
    >>> message[8:].view(np.float64).tolist()
    [5.0, 3.25]
    """
    left = 0.0
    if kept is not None:
        left = float(energy) - (energy_of(kept) if isinstance(kept, np.ndarray) and kept.ndim else float(kept))
    word = (lead | (0 if finite else NONFINITE)) % 2**64
    _HEADER.pack_into(message.data, 0, word, energy, (0.0 if left < 0 else left) + float(rounding))


def write_tail(out: NDArray[np.floating], finite: bool, stale: bool, energy: float, lost: float) -> None:
    """Write ``(not finite, stale, energy, lost)`` as numbers that ranks can add up.

    Parameters
    ----------
    out : array, shape (4,)
        float32 or float64. What is beyond float32 becomes infinite.
    finite, stale : bool
        Whether all elements of the gradient are finite numbers, and whether it is an old one.
    energy, lost : float
        Squared L2 norms of the gradient and of what was not sent of it.

    Examples
    --------
    >>> import numpy as np
    >>> out = np.empty(4, np.float32)
    >>> write_tail(out, True, False, 1e300, 0.5)
    >>> out.tolist()
    [0.0, 0.0, inf, 0.5]
    """
    out[0], out[1] = not finite, stale
    with contextlib.nullcontext() if max(energy, lost) < _FAR_BELOW else np.errstate(over="ignore"):
        out[2], out[3] = energy, lost


def sparse_add(
    messages: NDArray[np.uint8],
    values_at: Sequence[int],
    indices: NDArray[np.unsignedinteger],
    indices_at: Sequence[int],
    counts: Sequence[int],
    stored: str,
    factor: float,
    out: NDArray[np.floating],
    right: bool = True,
) -> bool:
    """Add ``factor`` times each of several selections to ``out``, in their order.

    Parameters
    ----------
    messages : array of uint8
        Holds the values of all selections.
    values_at : sequence of int
        Bytes of ``messages`` before each selection's values, multiples of the size of a value.
    indices : array of uint32 or uint8
        Holds the indices of all selections, as uint32; it may be ``messages``.
    indices_at : sequence of int
        Bytes of ``indices`` before each selection's indices, multiples of 4.
    counts : sequence of int
        Elements of each selection.
    stored : {"float32", "float64", "fp16", "bf16"}
        How values are stored: in the dtype of ``out``, or in 16 bits.
    factor : float
        Taken to the dtype of ``out`` before it multiplies. The product is rounded before it is added.
    out : array, shape (n,)
        float32 or float64.
    right : bool
        Whether all that led to this call was right: of several answers only the last one has then to be looked at.

    Returns
    -------
    bool
        False where a selection's indices do not ascend, without repetition, below n, or ``right`` is false. ``out`` may
        then hold anything.

    Examples
    --------
    >>> import numpy as np
    >>> messages = np.array([2, 4, 6, 8], np.float32).view(np.uint8)
    >>> indices = np.array([0, 1, 1, 3], np.uint32)
    >>> out = np.zeros(4, np.float32)
    >>> sparse_add(messages, (0, 8), indices, (0, 8), (2, 2), "float32", 0.5, out)
    True
    >>> out.tolist()
    [1.0, 5.0, 0.0, 4.0]
    """
    check_stored("sparse_add", stored, out.dtype)
    if not right:
        return False
    where = indices.view(np.uint8)
    for value_at, index_at, count in zip(values_at, indices_at, counts, strict=True):
        chosen = where[index_at : index_at + 4 * count].view(np.uint32)
        if not ascending_below(chosen, out.size):
            return False
        scatter_add(chosen, _values(messages, value_at, count, stored, out.dtype), factor, out)
    return True


def check_stored(name: str, stored: str, dtype: np.dtype[np.floating]) -> None:
    """Refuse values of another dtype than that of the array that they are added to, unless they have 16 bits."""
    if stored not in HALVES and _DTYPES.get(stored) != dtype:
        raise ValueError(f"{name}: values must be stored as {dtype.name}, fp16 or bf16, got {stored!r}")


def _values(
    messages: NDArray[np.uint8], start: int, count: int, stored: str, dtype: np.dtype[np.floating]
) -> NDArray[np.floating]:
    if stored not in HALVES:
        return messages[start : start + dtype.itemsize * count].view(dtype)
    values = np.empty(count, dtype)
    widen(messages[start : start + 2 * count].view(np.uint16), stored, values)
    return values
