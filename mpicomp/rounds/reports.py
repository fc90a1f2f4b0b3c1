"""Objects that ranks exchange as JSON."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import MessageError
from mpicomp.rounds.group import Group
from mpicomp.rounds.round import Round, Rounds

_BYTE, _LENGTH = np.dtype(np.uint8), np.dtype(np.int64)
_MAX_BYTES = 1 << 28  # of an object: some hundred for each of a million parameters


def from_one(content: dict[str, Any] | None, group: Group, subsystem: str, root: int = 0) -> Rounds[dict[str, Any]]:
    """Return the root's JSON-able object on all ranks, or raise `MessageError` in a caller's name. As rounds."""
    send = np.frombuffer(json.dumps(content).encode(), _BYTE) if group.rank == root else None
    length = None if send is None else np.array([send.size], _LENGTH)
    lengths = yield Round("bcast", (1,), _LENGTH, root=root, send=length, recv=np.empty(1, _LENGTH))
    [size] = checked_lengths(lengths, subsystem)
    arrived = yield Round("bcast", (size,), _BYTE, root=root, send=send, recv=np.empty(size, _BYTE))
    return read_object(arrived, subsystem, root)


def checked_lengths(lengths: NDArray[np.int64], subsystem: str) -> list[int]:
    """Return the bytes of each rank's object, before memory is allocated for them."""
    checked = [int(length) for length in lengths]
    for length in checked:
        if not 0 <= length <= _MAX_BYTES:
            raise MessageError(f"{subsystem}: a report must have from 0 to {_MAX_BYTES} bytes, got {length}")
    return checked


def read_object(arrived: NDArray[np.uint8], subsystem: str, rank: int) -> dict[str, Any]:
    """Return the object in a rank's report."""
    try:
        content = json.loads(arrived.tobytes())
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{subsystem}: from rank {rank}: a report is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise MessageError(f"{subsystem}: from rank {rank}: a report must be an object, got {content!r:.100}")
    return content
