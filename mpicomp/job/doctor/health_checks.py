"""The checks of the doctor: functions of `Facts` that yield problems with their fixes.

`PROBLEMS` keep a job from running right, `NOTES` from running well. A new check is a function in one of these lists.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpicomp.job.doctor.probes import Clocks, Rank, by_host, named, spans
from mpicomp.job.doctor.transports import TCP, ForkSafety, Transports
from mpicomp.job.launcher import Problem
from mpicomp.job.processors import binds

# MVAPICH's variables have an alias each.
_COMPRESSION = ("MPIR_CVAR_ENABLE_COMPRESSION", "MVP_ENABLE_COMPRESSION")
_COMPRESSION_ALGORITHM = ("MPIR_CVAR_COMPRESSION_ALGORITHM", "MVP_COMPRESSION_ALGORITHM")
_OFF = ("", "0", "false", "no", "off")
_WALL_CLOCK_S = 1.0  # difference of wall clocks that is tolerated: timestamps of files and logs are in seconds


@dataclass(frozen=True)
class Facts:
    """Facts about a job: input of the checks."""

    ranks: Sequence[Rank] = ()
    launcher: str | None = None  # a name of `mpicomp.job.launcher.Launch`
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    wheels: Mapping[str, str] = field(default_factory=dict)  # MPI libraries installed as Python packages
    origin: str | None = None  # of the MPI library that is loaded
    thread_level: str = "multiple"
    singletons: Problem | None = None
    transports: Transports | None = None
    adapters: Sequence[str] = ()
    fork: ForkSafety | None = None
    clocks: Clocks | None = None


Check = Callable[[Facts], Iterator[Problem]]


def mpi_wheels(facts: Facts) -> Iterator[Problem]:
    """Find several MPI libraries in one environment: they overwrite each other's files."""
    if len(facts.wheels) > 1:
        names = sorted(facts.wheels)
        yield Problem(
            f"{' and '.join(names)} are installed in one environment, and one of them has replaced the other's mpiexec",
            f"pip uninstall {' '.join(names)}, then install the one that you want",
        )


def singletons(facts: Facts) -> Iterator[Problem]:
    """Find processes that were started as one job, each of which is a world of its own."""
    if facts.singletons is not None:
        yield facts.singletons


def versions(facts: Facts) -> Iterator[Problem]:
    """Find ranks whose versions differ from rank 0's: a node with another environment."""
    ranks = facts.ranks
    for name in ("mpi_version", "python_version", "mpicomp", "mpi4py", "numpy", "numba", "torch"):
        other = next((rank for rank in ranks if rank.versions[name] != ranks[0].versions[name]), None)
        if other is not None:
            yield Problem(
                f"ranks differ in {name.replace('_', ' ')}: {ranks[0].versions[name]} on {ranks[0].host}, "
                f"{other.versions[name]} on {other.host}",
                "use the same environment on every host",
            )


def compressing_library(facts: Facts) -> Iterator[Problem]:
    """Find an MVAPICH that compresses messages itself, as floats and with losses."""
    version = (facts.ranks[0].versions["mpi_version"] or "") if facts.ranks else ""
    name = next((name for name in _COMPRESSION if facts.environ.get(name, "0").strip().lower() not in _OFF), None)
    lossless = any(facts.environ.get(name, "").lower() == "mpc" for name in _COMPRESSION_ALGORITHM)
    if "MVAPICH" in version.upper() and name is not None and not lossless:
        yield Problem(
            f"{name}={facts.environ[name]} has MVAPICH compress messages from GPUs as if they were floats, with "
            "losses: indices and codes arrive damaged",
            f"unset {name}",
        )


def slurm_cpus(facts: Facts) -> Iterator[Problem]:
    """Find the first rank whose CPUs or threads are not those that Slurm was asked for."""
    rank = next(filter(_misfits, facts.ranks), None)
    if rank is None:
        return
    requested = rank.cpus_per_task
    subject = f"SLURM_CPUS_PER_TASK={requested}, but rank {rank.rank} on {rank.host}"
    if len(rank.cpus) < (requested or 0):
        # srun does not inherit the option of sbatch, and launchers that start by srun are bound like one task.
        if facts.launcher == "slurm":
            fix = f"srun --cpus-per-task={requested}"
        elif facts.environ.get("SLURM_CPU_BIND") != "none":
            fix = "export SLURM_CPU_BIND=none"
        else:
            fix = f"sbatch --cpus-per-task={len(rank.cpus)}: the host gives the job no more"
        yield Problem(f"{subject} may run on {len(rank.cpus)} (cpus {spans(rank.cpus)})", fix)
    else:
        yield Problem(
            f"{subject} computes with {rank.threads} threads ({rank.threads_from})",
            "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK",
        )


def _misfits(rank: Rank) -> bool:
    requested = rank.cpus_per_task
    return requested is not None and (len(rank.cpus) < requested or rank.threads > requested)


def shared_cores(facts: Facts) -> Iterator[Problem]:
    """Find more ranks or threads than cores, and bindings that overlap."""
    for ranks in by_host(facts.ranks):
        host = ranks[0].host
        cpus = set().union(*(rank.cpus for rank in ranks))
        share = max(1, len(cpus) // len(ranks))
        if len(ranks) > len(cpus):
            yield Problem(
                f"{len(ranks)} ranks share {len(cpus)} cores on {host}: they wait for each other's turn, and times "
                "measured here mean little",
                f"start at most {len(cpus)} ranks on this host, or allow the job more cores",
            )
            continue
        threads = sum(rank.threads for rank in ranks)
        if threads > len(cpus) and not any(map(_misfits, ranks)):
            who = "1 rank computes" if len(ranks) == 1 else f"{len(ranks)} ranks compute"
            yield Problem(
                f"{who} with {threads} threads on {len(cpus)} cores of {host} ({ranks[0].threads_from}): threads wait "
                "for each other's turn",
                f"export OMP_NUM_THREADS={share}",
            )
        for one, other in itertools.combinations(ranks, 2):
            if one.cpus != other.cpus and set(one.cpus) & set(other.cpus):
                yield Problem(
                    f"ranks {one.rank} and {other.rank} on {host} are bound to cpus {spans(one.cpus)} and "
                    f"{spans(other.cpus)}, which overlap",
                    _bind(facts.launcher, share),
                )
                break


def openmp_binding(facts: Facts) -> Iterator[Problem]:
    """Find ranks that OpenMP binds to the same cores: it counts those of each rank from the first on."""
    for ranks in by_host(facts.ranks) if binds(facts.environ) else ():
        cpus = ranks[0].cpus
        sharing = sum(rank.cpus == cpus for rank in ranks)
        if sharing > 1 and len(cpus) > 1:
            names = ("OMP_PROC_BIND", "OMP_PLACES")
            settings = " ".join(f"{name}={facts.environ[name]}" for name in names if facts.environ.get(name))
            yield Problem(
                f"{settings} has OpenMP bind the main thread of each rank, and {sharing} ranks on {ranks[0].host} have "
                f"the same cpus {spans(cpus)}: all of them compute on the first",
                f"unset OMP_PROC_BIND OMP_PLACES, or {_bind(facts.launcher, max(1, len(cpus) // len(ranks)))}",
            )
            return


def _bind(launcher: str | None, cores: int) -> str:
    lines = {
        "slurm": f"srun --cpus-per-task={cores} --cpu-bind=cores",
        "openmpi": f"mpirun --map-by slot:PE={cores} --bind-to core",
        "hydra": f"mpiexec -bind-to core:{cores}",
    }
    return lines.get(launcher or "", f"let the launcher bind each rank to {cores} cores of its own")


def shared_gpus(facts: Facts) -> Iterator[Problem]:
    """Find ranks that share a GPU, and masks that name a GPU that is not there."""
    for ranks in by_host(facts.ranks):
        host = ranks[0].host
        masked = next((rank for rank in ranks if rank.gpu_error is not None), None)
        if masked is not None:
            reason, _, fix = str(masked.gpu_error).removeprefix("gpu: ").rpartition("; ")
            yield Problem(f"rank {masked.rank} on {host} works without a GPU: {reason}", fix)
        users: dict[str, list[Rank]] = {}
        for rank in ranks:
            if rank.device is not None:
                users.setdefault(rank.device.uuid, []).append(rank)
        num_users = sum(map(len, users.values()))
        if num_users > len(users):
            crowd = max(users.values(), key=len)
            why, fix = "", f"start at most {len(users)} ranks on this host, or give the job more GPUs"
            # One device in the mask of several ranks: it was meant for another rank, or exported for all.
            mask = crowd[0].gpu_mask
            if mask is not None and "," not in mask and all(rank.gpu_mask == mask for rank in crowd):
                why = f"; {named(crowd)} all have CUDA_VISIBLE_DEVICES={mask}"
                fix = "srun --gpus-per-task=1" if facts.launcher == "slurm" else "unset CUDA_VISIBLE_DEVICES"
            yield Problem(f"{num_users} ranks share {len(users)} GPUs on {host}{why}", fix)


def host_names(facts: Facts) -> Iterator[Problem]:
    """Find names that have no address on some host, each of them once."""
    first: dict[str, Rank] = {}
    for rank in facts.ranks:
        for name in rank.unresolved:
            first.setdefault(name, rank)
    for name, rank in first.items():
        yield Problem(
            f"the node name {name} does not resolve on {rank.host}: launchers that go by names cannot reach it",
            f"getent hosts {name}; put it with its address into DNS or /etc/hosts of every node",
        )


def unused_transports(facts: Facts) -> Iterator[Problem]:
    """Find a fast network, or shared memory, that messages do not use."""
    transports, hosts = facts.transports, by_host(facts.ranks)
    if transports is None:
        return
    if facts.adapters and transports.between == TCP and len(hosts) > 1:
        yield Problem(
            f"there is {', '.join(facts.adapters)}, but MPI talks tcp between hosts ({transports.reason})",
            "unset UCX_TLS UCX_NET_DEVICES OMPI_MCA_pml FI_PROVIDER; if that is not it, take the MPI of your site in "
            "place of a wheel",
        )
    if transports.inside == TCP and max(map(len, hosts)) > 1:
        yield Problem(
            f"ranks of one host talk tcp ({transports.reason})",
            "unset MPIR_CVAR_NOLOCAL UCX_TLS OMPI_MCA_btl, or add sm to the list",
        )


def forks(facts: Facts) -> Iterator[Problem]:
    """Find workers of a DataLoader that would corrupt memory."""
    if facts.fork is not None and facts.fork.dangerous:
        yield Problem(
            "DataLoader workers and other processes are started by fork, with live MPI: "
            f"{facts.fork.reason}, which ends in crashes or wrong data",
            "DataLoader(..., multiprocessing_context='forkserver'), or export RDMAV_FORK_SAFE=1",
        )


def launcher_on_path(facts: Facts) -> Iterator[Problem]:
    """Find an ``mpiexec`` on the PATH that belongs to another MPI library than the one that is loaded."""
    sibling = Path(sys.executable).with_name("mpiexec")
    found = shutil.which("mpiexec")
    if not facts.origin or facts.origin == "system" or found is None or not sibling.exists():
        return
    if Path(found).resolve() != sibling.resolve():
        yield Problem(
            f"mpiexec on the PATH is {found}, but MPI comes from the {facts.origin}",
            f"start jobs with {shlex.quote(str(sibling))}",
        )


def thread_level(facts: Facts) -> Iterator[Problem]:
    """Find a thread level with which exchange cannot overlap with computation."""
    if facts.thread_level not in ("serialized", "multiple"):
        yield Problem(
            f"the thread level is {facts.thread_level}: exchange cannot overlap with computation",
            "leave mpi4py.rc.thread_level alone, and use an MPI library built with threads",
        )


def wall_clocks(facts: Facts) -> Iterator[Problem]:
    """Find wall clocks that differ between hosts."""
    clocks = facts.clocks
    if clocks is not None and clocks.wall_difference_s > _WALL_CLOCK_S + clocks.error_s:
        yield Problem(
            f"wall clocks of the hosts differ by {clocks.wall_difference_s:.1f} s: times of files and logs do not fit",
            "chronyc tracking on every host, and ask your administrators to run chronyd",
        )


PROBLEMS: tuple[Check, ...] = (mpi_wheels, singletons, versions, compressing_library)
NOTES: tuple[Check, ...] = (
    slurm_cpus,
    shared_cores,
    openmp_binding,
    shared_gpus,
    host_names,
    unused_transports,
    forks,
    launcher_on_path,
    thread_level,
    wall_clocks,
)


def run_checks(checks: Sequence[Check], facts: Facts) -> list[Problem]:
    """Return the findings of some checks, in their order."""
    return [problem for check in checks for problem in check(facts)]
