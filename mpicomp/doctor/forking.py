"""The danger of forking a process in which MPI runs, as DataLoader workers do."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpicomp.doctor.wires import UNKNOWN, Wires
from mpicomp.system.launcher import Problem

_SAFE = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "FI_EFA_FORK_SAFE")


@dataclass(frozen=True)
class Forking:
    """The default start method of processes, and whether it is dangerous while MPI is running.

    Parameters
    ----------
    method
        Start method of `multiprocessing`, which DataLoader follows: ``"fork"``, ``"forkserver"`` or ``"spawn"``.
    dangerous
        Whether a child process breaks the memory that the network adapter has registered.
    reason
        The evidence for it.
    """

    method: str
    dangerous: bool
    reason: str


def default_method() -> str:
    """Return the start method of `multiprocessing` here, without fixing it."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def forking(method: str, carried: Wires, found: Sequence[str], environ: Mapping[str, str] | None = None) -> Forking:
    """Return whether a fork is dangerous.

    Parameters
    ----------
    method
        The result of `default_method`.
    carried, found
        The results of `mpicomp.doctor.wires.wires` and ``adapters``.
    environ
        The environment.

    Examples
    --------
    >>> forking("spawn", Wires("ucx", "shared memory", "rdma", ""), ["mlx5_0"], {}).dangerous
    False
    """
    environ = os.environ if environ is None else environ
    if method != "fork":
        return Forking(method, False, f"{method} starts processes that share no memory with MPI")
    if carried.between != "rdma" and not (found and carried.between == UNKNOWN):
        return Forking(method, False, f"{carried.between} survives a fork, as long as the child makes no MPI call")
    safe = next((f"{name}={environ[name]}" for name in _SAFE if environ.get(name, "0") != "0"), None)
    if safe is not None:
        return Forking(method, False, f"{safe} keeps what {', '.join(found)} has registered from the child")
    return Forking(method, True, f"{', '.join(found)} reads and writes memory that a forked child gets copies of")


def fork_notes(found: Forking) -> list[Problem]:
    """Notice that workers of a DataLoader would be dangerous."""
    if not found.dangerous:
        return []
    return [
        Problem(
            f"DataLoader workers and other processes are started by fork, with live MPI: {found.reason}, which ends in "
            "crashes or wrong data",
            "DataLoader(..., multiprocessing_context='forkserver'), or export RDMAV_FORK_SAFE=1",
        )
    ]
