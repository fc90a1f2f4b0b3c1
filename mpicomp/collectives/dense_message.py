"""The message of all elements: a header, then the array's numbers in full or in 16 bits, or packed.

======  =====  ===========================================================================================
offset  bytes  what
======  =====  ===========================================================================================
0       1      version, 1
1       1      flags, as in the sparse message
2       2      length in words of 8 bytes, this header among them, modulo 65536
4       4      elements
8       8      energy: squared L2 norm of the sender's whole array
16      8      lost: energy of what is not sent of it, and of what rounding takes away from what is
24      ..     the elements; a multiple of 8 bytes
======  =====  ===========================================================================================

Numbers are little-endian.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.wire_format import DAMAGED, NONFINITE, STALE
from mpicomp.errors import MessageError
from mpicomp.gpu import received_on_host

VERSION = 1
HEADER_BYTES = 24  # bytes of the header of a message

_PACKED = struct.Struct("<BBHIdd")  # version, flags, words, elements, energy, lost
_WORD = 8  # bytes of a word; the header counts the words of a message
_KNOWN = NONFINITE | STALE | DAMAGED


def dense_bytes(numel: int, dtype: np.dtype[Any], wire: str | None) -> int:
    """Return the length in bytes of a message with ``numel`` elements; a multiple of 8.

    >>> dense_bytes(3, np.dtype(np.float32), None), dense_bytes(3, np.dtype(np.float32), "fp16")
    (40, 32)
    """
    payload = numel * (dtype.itemsize if wire is None else 2)
    return HEADER_BYTES + -(-payload // 8) * 8


def write_header(
    message: NDArray[np.uint8], count: int, flags: int, energy: float, lost: float, finite: bool = True
) -> None:
    """Fill the header of a message of ``count`` elements; the numbers may be known on a device only."""
    words = message.size // _WORD % (1 << 16)
    lead = VERSION | flags << 8 | words << 16 | count << 32
    kernels.write_header(message, lead, finite, energy, None, lost)


def read_header(message: NDArray[np.uint8], count: int) -> tuple[int, float, float]:
    """Return the flags, the energy and the lost energy of a message that has to have ``count`` elements.

    >>> message = np.zeros(32, np.uint8)
    >>> write_header(message, 3, NONFINITE, 14.0, 0.0)
    >>> read_header(message, 3)
    (1, 14.0, 0.0)
    """
    if message.size < HEADER_BYTES:
        raise MessageError(f"message: at least {HEADER_BYTES} bytes are needed, got {message.size}")
    version, flags, words, elements, energy, lost = _PACKED.unpack_from(received_on_host(message[:HEADER_BYTES]).data)
    if version != VERSION:
        raise MessageError(f"message: version must be {VERSION}, got {version}; run one mpicomp on all ranks")
    if flags > _KNOWN:
        raise MessageError(f"message: flags must be below {_KNOWN + 1}, got {flags}")
    if elements != count:
        raise MessageError(f"message: {count} elements are expected, got {elements}")
    if words != message.size // _WORD % (1 << 16) or message.size % _WORD:
        raise MessageError(
            f"message: it has {message.size} bytes, of which its sender has written {words} words of {_WORD} "
            f"(modulo {1 << 16})"
        )
    return flags, energy, lost


def read_headers(messages: NDArray[np.uint8], count: int) -> tuple[int, float, float]:
    """Return all flags, and sums of the energies, of one message a rank, shape (ranks, bytes)."""
    flags, energy, lost = 0, 0.0, 0.0
    for rank, message in enumerate(messages):
        try:
            fields = read_header(message, count)
        except MessageError as error:
            raise MessageError(f"from rank {rank}: {error}") from error
        flags, energy, lost = flags | fields[0], energy + fields[1], lost + fields[2]
    return flags, energy, lost


def pack(
    array: NDArray[np.floating], wire: str | None, message: NDArray[np.uint8], sent: NDArray[np.floating]
) -> float:
    """Write an array behind a header, its rounded form to ``sent``; return the squared L2 norm of the rounding."""
    if wire is None:
        _payload(message, array.size, array.dtype)[:] = array
        return 0.0
    return kernels.narrow(array, wire, _payload(message, array.size, np.dtype(np.uint16)), sent)


def unpack(message: NDArray[np.uint8], wire: str | None, out: NDArray[np.floating]) -> None:
    """Write a message's numbers to an array."""
    if wire is None:
        out[:] = _payload(message, out.size, out.dtype)
    else:
        kernels.widen(_payload(message, out.size, np.dtype(np.uint16)), wire, out)


def add(message: NDArray[np.uint8], wire: str | None, out: NDArray[np.floating]) -> None:
    """Add a message's numbers to an array; infinity and NaN come out as they do."""
    if wire is None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(out, _payload(message, out.size, out.dtype), out=out)
    else:
        kernels.widen_add(_payload(message, out.size, np.dtype(np.uint16)), wire, out)


def _payload(message: NDArray[np.uint8], size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return message[HEADER_BYTES : HEADER_BYTES + size * dtype.itemsize].view(dtype)
