"""The ranks that are left when one has died: they agree on it, become a smaller group, and go on from one state."""

from collections.abc import Mapping
from typing import Any

from mpicomp.rounds import Group, Rounds
from mpicomp.rounds.reports import from_one
from mpicomp.transport import Transport


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


def common_state(state: Mapping[str, Any], group: Group) -> Rounds[dict[str, Any]]:
    """Return a reducer's state, on all ranks with what the first one's policy knows. As rounds.

    A report of a step may have reached some ranks and others not, and plans have to follow from the same.
    """
    shared = {name: state[name] for name in ("step", "policy", "cost")}
    return dict(state) | (yield from from_one(shared, group, "reducer"))
