"""The sparse message: a header, the values, the indices.

==========  =====  =====================================================
offset      bytes  what
==========  =====  =====================================================
0           1      version, 1
1           1      flags: 1 non-finite, 2 stale (see `mpicomp.reducer`)
2           1      bytes of a value, 4 or 8
3           1      zero
4           4      count, unsigned
8           8      energy: squared L2 norm of the accumulated gradient
16          8      energy of the selected values
24          c x v  values, float32 or float64
24 + c x v  c x 4  indices, unsigned 32-bit, ascending; padded to 8 bytes
==========  =====  =====================================================

Numbers are little-endian. Values stand before indices so that both are aligned.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.base import Selection
from mpicomp.errors import MessageError

VERSION = 1
NONFINITE = 1
STALE = 2

_HEADER = np.dtype(
    [
        ("version", "u1"),
        ("flags", "u1"),
        ("itemsize", "u1"),
        ("zero", "u1"),
        ("count", "<u4"),
        ("energy", "<f8"),
        ("kept", "<f8"),
    ]
)


@dataclass
class Sparse:
    """A message that was read."""

    selection: Selection
    flags: int
    energy: float
    kept: float


def message_bytes(count: int, itemsize: int) -> int:
    """Give the length in bytes of a message with ``count`` values of ``itemsize`` bytes.

    Examples
    --------
    >>> message_bytes(0, 4), message_bytes(10, 4), message_bytes(1, 8)
    (24, 104, 40)
    """
    return _HEADER.itemsize + -(-count * (itemsize + 4) // 8) * 8


def write_message(out: NDArray[np.uint8], selection: Selection, flags: int, energy: float, kept: float) -> None:
    """Fill ``out``, which has the length of `message_bytes`."""
    count = selection.indices.size
    itemsize = selection.values.itemsize
    header = out[: _HEADER.itemsize].view(_HEADER)
    header[0] = (VERSION, flags, itemsize, 0, count, energy, kept)
    values, indices = _fields(out, count, selection.values.dtype)
    values[:] = selection.values
    indices[:] = selection.indices


def read_message(message: NDArray[np.uint8], dtype: np.dtype) -> Sparse:
    """Read a message without copying it.

    Parameters
    ----------
    message : array of uint8
        8-byte aligned.
    dtype : numpy.dtype
        The values' expected dtype.

    Raises
    ------
    MessageError
        Where the version, the width of values or the length is not what it has to be. Indices are checked by whoever
        uses them.
    """
    if message.size < _HEADER.itemsize:
        raise MessageError(f"message: at least {_HEADER.itemsize} bytes are needed, got {message.size}")
    header = message[: _HEADER.itemsize].view(_HEADER)[0]
    count = int(header["count"])
    if header["version"] != VERSION:
        raise MessageError(f"message: version must be {VERSION}, got {header['version']}; run one mpicomp on all ranks")
    if header["itemsize"] != dtype.itemsize:
        raise MessageError(f"message: values must have {dtype.itemsize} bytes, got {header['itemsize']}")
    if message.size != message_bytes(count, dtype.itemsize):
        raise MessageError(
            f"message: {count} values make {message_bytes(count, dtype.itemsize)} bytes, got {message.size}"
        )
    values, indices = _fields(message, count, dtype)
    return Sparse(Selection(indices, values), int(header["flags"]), float(header["energy"]), float(header["kept"]))


def _fields(message: NDArray[np.uint8], count: int, dtype: np.dtype) -> tuple[NDArray[np.floating], NDArray[np.uint32]]:
    start = _HEADER.itemsize
    middle = start + count * dtype.itemsize
    values = message[start:middle].view(dtype)
    indices = message[middle : middle + 4 * count].view(np.uint32)
    return values, indices
