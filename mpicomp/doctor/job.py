"""Report on the whole job, gathered from all ranks."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import asdict
from typing import Any

from mpicomp.doctor import threads
from mpicomp.doctor.devices import look, mask_of
from mpicomp.doctor.forking import default_method, fork_notes, forking
from mpicomp.doctor.installed import packages, two_libraries, wheels
from mpicomp.doctor.loaded import describe, launcher_notes, load, thread_notes
from mpicomp.doctor.measured import clock_notes, measure
from mpicomp.doctor.names import name_notes, resolves
from mpicomp.doctor.ranks import Rank, by_host, difference_problems, spans
from mpicomp.doctor.sharing import cpu_notes, gpu_notes, openmp_notes
from mpicomp.doctor.wires import adapters, wire_notes, wires
from mpicomp.system import cuda, launcher
from mpicomp.system.launcher import Problem
from mpicomp.system.libraries import files, library

SCHEMA = 1


def local() -> dict[str, Any]:
    """Return the report on this process alone, made without MPI.

    It starts another program (nvidia-smi), so call it before MPI is initialised: not every network survives
    a fork.
    """
    devices, error = look()
    return {
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": [str(device) for device in devices],
        "devices": devices,
        "gpu_mask": mask_of(),
        "gpu_error": error,
        "launcher": launcher.detect(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": packages(),
    }


def examine() -> dict[str, Any]:
    """Inspect the whole job; called by all ranks. It initialises MPI.

    Returns
    -------
    dict
        Object that ``mpicomp doctor --json`` prints, the same on every rank. Fields are added, never changed, while
        ``schema`` is 1. docs/cluster.md has all of them.
    """
    mine = local()
    launch: launcher.Launch | None = mine["launcher"]
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "mpi": None,
        "ranks": 0,
        "hosts": [],
        "cuda_aware": {"value": False, "reason": "there is no MPI"},
        "gpus": [],
        "binding": [],
        "transports": None,
        "link": None,
        "clocks": None,
        "fork": None,
        "launcher": None if launch is None else {"name": launch.name, "size": launch.size},
        "python": mine["python"],
        "packages": mine["packages"],
        "problems": [],
        "notes": [],
    }
    problems, notes = two_libraries(wheels()), []
    probed = None
    if mine["devices"] and (launch is None or launch.rank == 0) and "MPICOMP_CUDA_AWARE" not in os.environ:
        probed = cuda.probe()  # starts a process, so before MPI; what rank 0 finds is reported
    mpi, missing = load(launch)
    if mpi is None or missing is not None:
        problems += [missing] if missing else []
    else:
        found, worries = _with_mpi(mpi, mine, probed, report)
        # The environment of rank 0 counts: what each process finds wrong for itself has to be one verdict.
        problems, notes = mpi.COMM_WORLD.bcast((problems + found, worries))
    report["problems"] = [{"what": problem.what, "fix": problem.fix} for problem in problems]
    report["notes"] = [{"what": note.what, "fix": note.fix} for note in notes]
    return report


def _with_mpi(
    mpi: Any, mine: dict[str, Any], probed: cuda.Awareness | None, report: dict[str, Any]
) -> tuple[list[Problem], list[Problem]]:
    """Fill in the entries that need MPI; return problems and notes. Collective."""
    world, path = mpi.COMM_WORLD, library()
    vendor = mpi.get_vendor()[0]
    report["mpi"] = describe(mpi, path)
    aware = cuda.cuda_aware(vendor, path, version=mpi.Get_library_version(), probed=probed)
    report["cuda_aware"] = world.bcast(aware._asdict())

    ranks = _gather(mpi, mine, report["mpi"]["version"])
    hosts = by_host(ranks)
    name = None if mine["launcher"] is None else mine["launcher"].name
    report["ranks"] = world.size
    for here in hosts:
        cpus = set().union(*(rank.cpus for rank in here))
        report["hosts"].append({"name": here[0].host, "ranks": [rank.rank for rank in here], "cores": len(cpus)})
    report["gpus"] = [str(rank.device or "none") for rank in ranks]
    report["binding"] = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "cpus": spans(rank.cpus),
            "threads": rank.threads,
            "reason": rank.threads_from,
        }
        for rank in ranks
    ]
    cards = adapters()
    carried = wires(vendor, mpi.Get_library_version(), files(), cards)
    forks = forking(default_method(), carried, cards)
    report["transports"], report["fork"] = world.bcast((asdict(carried), asdict(forks)))

    singletons = launcher.singletons(None, world.size, "openmpi" if vendor == "Open MPI" else "mpich")
    problems = ([singletons] if singletons else []) + difference_problems(ranks)
    notes = cpu_notes(ranks, name) + openmp_notes(ranks, name) + gpu_notes(ranks, name) + name_notes(ranks)
    notes += wire_notes(carried, cards, max(map(len, hosts)), len(hosts)) + fork_notes(forks)
    notes += launcher_notes(report["mpi"]["origin"]) + thread_notes(report["mpi"]["thread_level"])
    if world.size > 1:
        link, clocks = measure(world)
        report["link"] = None if link is None else asdict(link)
        report["clocks"] = asdict(clocks)
        notes += clock_notes(clocks)
    return problems, notes


def _gather(mpi: Any, mine: dict[str, Any], mpi_version: str) -> list[Rank]:
    """Return the reports of all ranks about themselves. Collective."""
    world = mpi.COMM_WORLD
    shared = world.Split_type(mpi.COMM_TYPE_SHARED)
    place, leader = shared.rank, shared.bcast(world.rank)  # the leader tells two hosts of the same name apart
    shared.Free()
    names = {first: host for host, first in world.allgather((mine["host"], leader))}
    unresolved: tuple[str, ...] = ()
    if world.rank == leader:
        # Each name is looked up twice, on its host and on another one, however many there are.
        following = min((first for first in names if first > leader), default=min(names))
        asked = dict.fromkeys((mine["host"], names[following]))
        unresolved = tuple(host for host in asked if not resolves(host))
    count, reason = threads.count(os.environ, len(mine["cores"]))
    devices = mine["devices"]
    ranks: list[Rank] = world.allgather(
        Rank(
            rank=world.rank,
            leader=leader,
            host=mine["host"],
            cpus=tuple(mine["cores"]),
            threads=count,
            threads_from=reason,
            cpus_per_task=threads.of_task(os.environ),
            device=devices[place % len(devices)] if devices else None,
            gpu_mask=mine["gpu_mask"],
            gpu_error=mine["gpu_error"],
            unresolved=unresolved,
            versions={**mine["packages"], "python_version": mine["python"]["version"], "mpi_version": mpi_version},
        )
    )
    return ranks
