"""Report on the whole job, gathered from all ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from mpicomp.job import cuda_aware, launcher
from mpicomp.job.doctor import probes
from mpicomp.job.doctor.health_checks import NOTES, PROBLEMS, Facts, mpi_wheels, run_checks
from mpicomp.job.doctor.probes import Rank, by_host, describe_process, gather_ranks, packages, spans
from mpicomp.job.doctor.transports import adapters, detect_transports, fork_safety
from mpicomp.job.gpus import Gpu
from mpicomp.job.launcher import Problem

SCHEMA = 1


def examine() -> dict[str, Any]:
    """Inspect the whole job and return the object of ``mpicomp doctor --json``. Collective; it initializes MPI."""
    here, devices = describe_process()
    launch = launcher.detect()
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
        "python": {"version": here.versions["python_version"], "executable": sys.executable},
        "packages": packages(),
        "problems": [],
        "notes": [],
    }
    probed = None
    if devices and (launch is None or launch.rank == 0) and "MPICOMP_CUDA_AWARE" not in os.environ:
        probed = cuda_aware.probe()  # starts a process, so before MPI; rank 0's result is reported
    mpi, missing = probes.load_mpi(launch)
    notes: list[Problem] = []
    if mpi is None or missing is not None:
        problems = list(mpi_wheels(Facts(wheels=probes.wheels()))) + ([missing] if missing else [])
    else:
        facts = _with_mpi(mpi, here, devices, probed, report)
        # The environment of rank 0 counts, so that all ranks reach one verdict.
        problems, notes = mpi.COMM_WORLD.bcast((run_checks(PROBLEMS, facts), run_checks(NOTES, facts)))
    report["problems"] = [asdict(problem) for problem in problems]
    report["notes"] = [asdict(note) for note in notes]
    return report


def _with_mpi(
    mpi: Any, here: Rank, devices: Sequence[Gpu], probed: cuda_aware.Awareness | None, report: dict[str, Any]
) -> Facts:
    world, path = mpi.COMM_WORLD, cuda_aware.library()
    vendor, version = mpi.get_vendor()[0], mpi.Get_library_version()
    report["mpi"] = probes.describe_mpi(mpi, path)
    aware = cuda_aware.cuda_aware(vendor, path, version=version, probed=probed)
    report["cuda_aware"] = world.bcast(aware._asdict())

    ranks = gather_ranks(mpi, here, devices, report["mpi"]["version"])
    report["ranks"] = world.size
    for of_host in by_host(ranks):
        cpus = set().union(*(rank.cpus for rank in of_host))
        report["hosts"].append({"name": of_host[0].host, "ranks": [rank.rank for rank in of_host], "cores": len(cpus)})
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
    transports = detect_transports(vendor, version, cuda_aware.files(), cards)
    # Asked for without fixing it.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    fork = fork_safety(method, transports, cards)
    report["transports"], report["fork"] = world.bcast((asdict(transports), asdict(fork)))
    launch = launcher.detect()
    facts = Facts(
        ranks=ranks,
        launcher=None if launch is None else launch.name,
        wheels=probes.wheels(),
        origin=report["mpi"]["origin"],
        thread_level=report["mpi"]["thread_level"],
        singletons=launcher.singletons(world.size, "openmpi" if vendor == "Open MPI" else "mpich"),
        transports=transports,
        adapters=cards,
        fork=fork,
    )
    if world.size > 1:
        link, clocks = probes.measure(world)
        report["link"] = None if link is None else asdict(link)
        report["clocks"] = asdict(clocks)
        facts = replace(facts, clocks=clocks)
    return facts
