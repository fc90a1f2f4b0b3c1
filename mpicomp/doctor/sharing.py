"""Checks of cores and GPUs that ranks of one host share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from mpicomp.doctor.ranks import Rank, by_host, named, spans
from mpicomp.system.launcher import Problem
from mpicomp.system.processors import binds


def cpu_notes(ranks: Sequence[Rank], launcher: str | None) -> list[Problem]:
    """Notice cores that ranks or their threads have to wait for, and bindings that overlap.

    Parameters
    ----------
    ranks
        All.
    launcher
        Its name as in `mpicomp.system.launcher.Launch`, None without one.
    """
    notes = _slurm_notes(ranks, launcher)
    for here in by_host(ranks):
        host = here[0].host
        cpus = sorted(set().union(*(rank.cpus for rank in here)))
        share = max(1, len(cpus) // len(here))
        if len(here) > len(cpus):
            notes.append(
                Problem(
                    f"{len(here)} ranks share {len(cpus)} cores on {host}: they wait for each other's turn, "
                    "and times measured here mean little",
                    f"start at most {len(cpus)} ranks on this host, or allow the job more cores",
                )
            )
            continue
        threads = sum(rank.threads for rank in here)
        who = "1 rank computes" if len(here) == 1 else f"{len(here)} ranks compute"
        if threads > len(cpus) and not any(map(_misfits, here)):
            notes.append(
                Problem(
                    f"{who} with {threads} threads on {len(cpus)} cores of "
                    f"{host} ({here[0].threads_from}): threads wait for each other's turn",
                    f"export OMP_NUM_THREADS={share}",
                )
            )
        for one, other in itertools.combinations(here, 2):
            both = set(one.cpus) & set(other.cpus)
            if both and one.cpus != other.cpus:
                notes.append(
                    Problem(
                        f"ranks {one.rank} and {other.rank} on {host} are bound to cpus {spans(one.cpus)} and "
                        f"{spans(other.cpus)}, which overlap",
                        _bind(launcher, share),
                    )
                )
                break
    return notes


def openmp_notes(ranks: Sequence[Rank], launcher: str | None, environ: Mapping[str, str] = os.environ) -> list[Problem]:
    """Notice ranks that OpenMP binds to the same cores: it counts those of each rank from the first on."""
    for here in by_host(ranks):
        shared = [rank for rank in here if rank.cpus == here[0].cpus]
        if binds(environ) and len(shared) > 1 and len(here[0].cpus) > 1:
            settings = " ".join(
                f"{name}={environ[name]}" for name in ("OMP_PROC_BIND", "OMP_PLACES") if environ.get(name)
            )
            return [
                Problem(
                    f"{settings} has OpenMP bind the main thread of each rank, and {len(shared)} ranks on "
                    f"{here[0].host} have the same cpus {spans(here[0].cpus)}: all of them compute on the first",
                    f"unset OMP_PROC_BIND OMP_PLACES, or {_bind(launcher, max(1, len(here[0].cpus) // len(here)))}",
                )
            ]
    return []


def gpu_notes(ranks: Sequence[Rank], launcher: str | None) -> list[Problem]:
    """Notice ranks that meet on a GPU, and masks that name a GPU that is not there.

    Parameters
    ----------
    ranks
        All.
    launcher
        See `cpu_notes`.
    """
    notes = []
    for here in by_host(ranks):
        host = here[0].host
        masked = next((rank for rank in here if rank.gpu_error is not None), None)
        if masked is not None:
            what, _, fix = str(masked.gpu_error).removeprefix("gpu: ").rpartition("; ")
            notes.append(Problem(f"rank {masked.rank} on {host} works without a GPU: {what}", fix))
        users: dict[str, list[Rank]] = {}
        for rank in here:
            if rank.device is not None:
                users.setdefault(rank.device.uuid, []).append(rank)
        taken = sum(map(len, users.values()))
        if taken > len(users):
            crowd = max(users.values(), key=len)
            # One device in the mask of several ranks: whoever set it meant another rank, or exported it for all.
            mask = crowd[0].gpu_mask
            why = ""
            if mask is not None and "," not in mask and all(rank.gpu_mask == mask for rank in crowd):
                why = f"; {named(crowd)} all have CUDA_VISIBLE_DEVICES={mask}"
            notes.append(
                Problem(
                    f"{taken} ranks share {len(users)} GPUs on {host}{why}",
                    _own_gpu(launcher, bool(why), len(users)),
                )
            )
    return notes


def _misfits(rank: Rank) -> bool:
    asked = rank.cpus_per_task
    return asked is not None and (len(rank.cpus) < asked or rank.threads > asked)


def _slurm_notes(ranks: Sequence[Rank], launcher: str | None) -> list[Problem]:
    """Compare what Slurm says that a task has with what it may use and does use; the first rank tells for all."""
    rank = next(filter(_misfits, ranks), None)
    if rank is None:
        return []
    asked = rank.cpus_per_task
    said = f"SLURM_CPUS_PER_TASK={asked}, but rank {rank.rank} on {rank.host}"
    if len(rank.cpus) < (asked or 0):
        # srun does not take over what sbatch was told, and the launchers that start by srun are bound like one task.
        fix = f"srun --cpus-per-task={asked}" if launcher == "slurm" else "export SLURM_CPU_BIND=none"
        return [Problem(f"{said} may run on {len(rank.cpus)} (cpus {spans(rank.cpus)})", fix)]
    return [
        Problem(
            f"{said} computes with {rank.threads} threads ({rank.threads_from})",
            "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK",
        )
    ]


def _bind(launcher: str | None, cores: int) -> str:
    """Return the option of a launcher that gives each rank cores of its own."""
    lines = {
        "slurm": f"srun --cpus-per-task={cores} --cpu-bind=cores",
        "openmpi": f"mpirun --map-by slot:PE={cores} --bind-to core",
        "hydra": f"mpiexec -bind-to core:{cores}",
    }
    return lines.get(launcher or "", f"let the launcher bind each rank to {cores} cores of its own")


def _own_gpu(launcher: str | None, masked: bool, gpus: int) -> str:
    if masked:
        return "srun --gpus-per-task=1" if launcher == "slurm" else "unset CUDA_VISIBLE_DEVICES"
    return f"start at most {gpus} ranks on this host, or give the job more GPUs"
