"""The ranks that are left when one has died: they agree on it, become a smaller group, and go on from one state."""

import json
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from mpicomp.rounds import Asked, Group, Round
from mpicomp.transport import Transport

_BYTE = np.dtype(np.uint8)
_LENGTH = np.dtype(np.int64)


def leave_the_dead(transport: Transport, agreed: bool) -> list[int]:
    """Make a transport that of the ranks which are left, and return the others. Collective over those that are left.

    Parameters
    ----------
    transport : Transport
        All rounds on it end, so that nobody waits for this rank any more.
    agreed : bool
        Whether this rank has taken part in the agreement on the step already.
    """
    transport.revoke()
    if not agreed:
        transport.agree(False)
    return transport.shrink()


def common_state(state: Mapping[str, Any], group: Group) -> Generator[Asked, Any, dict[str, Any]]:
    """Return a reducer's state, on all ranks with what the first one's policy knows. As rounds.

    A report of a step may have reached some ranks and others not, and plans have to follow from the same.
    """
    shared = json.dumps({name: state[name] for name in ("step", "policy", "cost")}).encode()
    length = yield Round("bcast", [1], _LENGTH, send=np.array([len(shared)], _LENGTH), recv=np.empty(1, _LENGTH))
    size = int(length[0])
    send = np.frombuffer(shared, _BYTE) if group.rank == 0 else None
    told = yield Round("bcast", [size], _BYTE, send=send, recv=np.empty(size, _BYTE))
    of_first: dict[str, Any] = json.loads(told.tobytes())
    return dict(state) | of_first
