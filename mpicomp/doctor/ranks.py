"""The report of one rank about itself, which is gathered from all ranks: host, cores, threads, GPU, versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpicomp.system.gpus import Gpu
from mpicomp.system.launcher import Problem


@dataclass(frozen=True)
class Rank:
    """The report of one rank.

    Parameters
    ----------
    rank
        In MPI.COMM_WORLD.
    leader
        The lowest rank of its host: two hosts may have the same name.
    host
        The name of its host.
    cpus
        The numbers of the cores that it may run on.
    threads, threads_from
        Number of threads that NumPy, Numba and torch compute with, and the setting that it comes from.
    cpus_per_task
        Number of CPUs of a task according to Slurm; None where Slurm does not say.
    device
        The GPU that this rank computes on, None without one.
    gpu_mask, gpu_error
        ``CUDA_VISIBLE_DEVICES``, and the error that it causes.
    unresolved
        Names of hosts, this one or the next, for which this host knows no address.
    versions
        Versions of MPI, Python and packages.
    """

    rank: int
    leader: int
    host: str
    cpus: tuple[int, ...]
    threads: int
    threads_from: str
    cpus_per_task: int | None
    device: Gpu | None
    gpu_mask: str | None
    gpu_error: str | None
    unresolved: tuple[str, ...]
    versions: dict[str, str | None]


def by_host(ranks: Iterable[Rank]) -> list[list[Rank]]:
    """Return the ranks of each host, hosts in the order of their lowest ranks."""
    hosts: dict[int, list[Rank]] = {}
    for rank in ranks:
        hosts.setdefault(rank.leader, []).append(rank)
    return [hosts[leader] for leader in sorted(hosts)]


def spans(numbers: Sequence[int]) -> str:
    """Write numbers in the short form of Linux and Slurm.

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
    return f"rank{'s' * (len(ranks) != 1)} {spans([rank.rank for rank in ranks])}"


def difference_problems(ranks: Sequence[Rank]) -> list[Problem]:
    """Find ranks that run other versions than rank 0: another node with another environment."""
    problems = []
    for name in ("mpi_version", "python_version", "mpicomp", "mpi4py", "numpy", "numba", "torch"):
        first = next((rank for rank in ranks if rank.versions[name] != ranks[0].versions[name]), None)
        if first is not None:
            problems.append(
                Problem(
                    f"ranks differ in {name.replace('_', ' ')}: {ranks[0].versions[name]} on "
                    f"{ranks[0].host}, {first.versions[name]} on {first.host}",
                    "use the same environment on every host",
                )
            )
    return problems
