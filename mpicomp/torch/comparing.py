"""Comparison of tensors that have to have the same values on all ranks."""

import hashlib
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.errors import DisagreementError
from mpicomp.rounds import Asked, Group, Round
from mpicomp.torch.broadcast import as_bytes

_BYTE = np.dtype(np.uint8)
_DIGEST = 16  # bytes of a digest


def share(own: Any, group: Group) -> Generator[Asked, Any, NDArray[np.uint8]]:
    """Return everyone's bytes, of which all have equally many, a row for each rank. As rounds."""
    send = np.asarray(own, _BYTE)
    everyones = yield Round(
        "allgatherv", [send.size] * group.size, _BYTE, send=send, recv=np.empty(group.size * send.size, _BYTE)
    )
    told: NDArray[np.uint8] = everyones.reshape(group.size, -1)
    return told


def check_same(
    tensors: Mapping[str, torch.Tensor], group: Group, subsystem: str, advice: str
) -> Generator[Asked, Any, None]:
    """Make sure that all ranks have the same values, bit for bit. As rounds.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Of the same names, shapes and dtypes on all ranks.
    group : Group
        All ranks.
    subsystem, advice : str
        Start and end of the error message.

    Raises
    ------
    DisagreementError
        On all ranks where some tensor differs.
    """
    digests = np.frombuffer(b"".join(map(_digest, tensors.values())), _BYTE)
    everyones = (yield from share(digests, group)).reshape(group.size, len(tensors), _DIGEST)
    differs = (everyones != everyones[0]).any(axis=2)
    for name, ranks in zip(tensors, differs.T, strict=True):
        if ranks.any():
            raise DisagreementError(
                f"{subsystem}: parameter '{name}' has other values on rank {int(ranks.argmax())} than on rank 0; "
                f"{advice}"
            )


def _digest(tensor: torch.Tensor) -> bytes:
    values = as_bytes(tensor.detach().cpu().contiguous())
    return hashlib.blake2b(values.data, digest_size=_DIGEST).digest()
