"""The dense message: a header, then the array's numbers in full or in 16 bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels import cpu

HEADER = np.dtype([("flags", "<u4"), ("zero", "<u4"), ("energy", "<f8"), ("lost", "<f8")])
"""Flags as in the sparse message; squared L2 norms of the sender's whole array and of what is not sent of it."""


def dense_bytes(numel: int, dtype: np.dtype[Any], wire: str | None) -> int:
    """Give the length in bytes of a message with ``numel`` elements; a multiple of 8.

    Examples
    --------
    >>> import numpy as np
    >>> dense_bytes(3, np.dtype(np.float32), None), dense_bytes(3, np.dtype(np.float32), "fp16")
    (40, 32)
    """
    payload = numel * (dtype.itemsize if wire is None else 2)
    return HEADER.itemsize + -(-payload // 8) * 8


def write_header(message: NDArray[np.uint8], flags: int, energy: float, lost: float) -> None:
    """Fill the header of a message."""
    message[: HEADER.itemsize].view(HEADER)[0] = (flags, 0, energy, lost)


def read_header(message: NDArray[np.uint8]) -> tuple[int, float, float]:
    """Give the flags, the energy and the lost energy."""
    header = message[: HEADER.itemsize].view(HEADER)[0]
    return int(header["flags"]), float(header["energy"]), float(header["lost"])


def pack(
    array: NDArray[np.floating], wire: str | None, message: NDArray[np.uint8], sent: NDArray[np.floating]
) -> float:
    """Write an array behind a message's header.

    Parameters
    ----------
    array : array, shape (n,)
        float32 or float64.
    wire : {None, "fp16", "bf16"}
        None: in full.
    message : array of uint8
        As long as `dense_bytes` says.
    sent : array, shape (n,)
        Receives what the receiver will see where that is rounded, and is left as it is where it is not.

    Returns
    -------
    float
        Squared L2 norm of what rounding took away.
    """
    if wire is None:
        _payload(message, array.size, array.dtype)[:] = array
        return 0.0
    return cpu.narrow(array, wire, _payload(message, array.size, np.dtype(np.uint16)), sent)


def unpack(message: NDArray[np.uint8], wire: str | None, out: NDArray[np.floating]) -> None:
    """Write a message's numbers to an array."""
    if wire is None:
        out[:] = _payload(message, out.size, out.dtype)
    else:
        cpu.widen(_payload(message, out.size, np.dtype(np.uint16)), wire, out)


def add(message: NDArray[np.uint8], wire: str | None, out: NDArray[np.floating]) -> None:
    """Add a message's numbers to an array; infinity and NaN come out as they do."""
    if wire is None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(out, _payload(message, out.size, out.dtype), out=out)
    else:
        cpu.widen_add(_payload(message, out.size, np.dtype(np.uint16)), wire, out)


def _payload(message: NDArray[np.uint8], size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return message[HEADER.itemsize : HEADER.itemsize + size * dtype.itemsize].view(dtype)
