"""One rank's description of itself, gathered from all ranks: host, cores, threads, GPU, versions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpicomp.doctor.probes import cpus_per_task, resolves, thread_count
from mpicomp.system.gpus import Gpu


@dataclass(frozen=True)
class Rank:
    """What one rank reports about itself."""

    rank: int  # in MPI.COMM_WORLD
    leader: int  # lowest rank of the host: two hosts may have the same name
    host: str
    cpus: tuple[int, ...]  # cores that it may run on
    threads: int  # of NumPy, Numba and torch
    threads_from: str  # the setting that `threads` comes from
    cpus_per_task: int | None  # Slurm's; None where it is not set
    device: Gpu | None
    gpu_mask: str | None  # CUDA_VISIBLE_DEVICES
    gpu_error: str | None  # the error that the mask causes
    unresolved: tuple[str, ...]  # host names, this one's or the next one's, without an address here
    versions: dict[str, str | None]  # of MPI, Python and packages


def gather_ranks(mpi: Any, local: dict[str, Any], mpi_version: str) -> list[Rank]:
    """Return the description of every rank; `local` is this one's result of `mpicomp.doctor.local`. Collective."""
    world = mpi.COMM_WORLD
    shared = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, leader = shared.rank, shared.bcast(world.rank)
    shared.Free()
    names = {leader_of_host: host for host, leader_of_host in world.allgather((local["host"], leader))}
    unresolved: tuple[str, ...] = ()
    if world.rank == leader:
        # Each name is looked up twice, on its host and on another one, however many hosts there are.
        following = min((other for other in names if other > leader), default=min(names))
        unresolved = tuple(name for name in dict.fromkeys((local["host"], names[following])) if not resolves(name))
    threads, threads_from = thread_count(os.environ, len(local["cores"]))
    devices = local["devices"]
    ranks: list[Rank] = world.allgather(
        Rank(
            rank=world.rank,
            leader=leader,
            host=local["host"],
            cpus=tuple(local["cores"]),
            threads=threads,
            threads_from=threads_from,
            cpus_per_task=cpus_per_task(os.environ),
            device=devices[local_rank % len(devices)] if devices else None,
            gpu_mask=local["gpu_mask"],
            gpu_error=local["gpu_error"],
            unresolved=unresolved,
            versions={**local["packages"], "python_version": local["python"]["version"], "mpi_version": mpi_version},
        )
    )
    return ranks


def by_host(ranks: Iterable[Rank]) -> list[list[Rank]]:
    """Return the ranks of each host, hosts in the order of their lowest ranks."""
    hosts: dict[int, list[Rank]] = {}
    for rank in ranks:
        hosts.setdefault(rank.leader, []).append(rank)
    return [hosts[leader] for leader in sorted(hosts)]


def spans(numbers: Iterable[int]) -> str:
    """Format numbers in the short form of Linux and Slurm.

    Examples
    --------
    >>> spans([0, 1, 2, 8])
    '0-2,8'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def named(ranks: Sequence[Rank]) -> str:
    """Name ranks in a sentence: ``rank 3`` or ``ranks 0-3``."""
    return f"rank{'s' * (len(ranks) != 1)} {spans(rank.rank for rank in ranks)}"
