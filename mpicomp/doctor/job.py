"""Report on the whole job, gathered from all ranks."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import asdict, replace
from typing import Any

from mpicomp.doctor import probes
from mpicomp.doctor.health_checks import NOTES, PROBLEMS, Facts, mpi_wheels, run_checks
from mpicomp.doctor.probes import by_host, gather_ranks, spans
from mpicomp.doctor.transports import adapters, detect_transports, fork_safety
from mpicomp.system import cuda_aware, launcher
from mpicomp.system.cuda_aware import files, library
from mpicomp.system.launcher import Problem

SCHEMA = 1


def local() -> dict[str, Any]:
    """Return the report on this process alone, before MPI is initialized: it starts programs, and a fork may harm."""
    devices, error = probes.visible_gpus()
    return {
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": [str(device) for device in devices],
        "devices": devices,
        "gpu_mask": probes.gpu_mask(),
        "gpu_error": error,
        "launcher": launcher.detect(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": probes.packages(),
        "torch_masks": probes.torch_masks(),
    }


def examine() -> dict[str, Any]:
    """Inspect the whole job and return the object of ``mpicomp doctor --json``. Collective; it initializes MPI."""
    here = local()
    launch: launcher.Launch | None = here["launcher"]
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
        "python": here["python"],
        "packages": here["packages"],
        "problems": [],
        "notes": [],
    }
    probed = None
    if here["devices"] and (launch is None or launch.rank == 0) and "MPICOMP_CUDA_AWARE" not in os.environ:
        probed = cuda_aware.probe()  # starts a process, so before MPI; rank 0's result is reported
    mpi, missing = probes.load_mpi(launch)
    notes: list[Problem] = []
    if mpi is None or missing is not None:
        problems = list(mpi_wheels(Facts(wheels=probes.wheels()))) + ([missing] if missing else [])
    else:
        facts = _with_mpi(mpi, here, probed, report)
        # The environment of rank 0 counts, so that all ranks come to one verdict.
        problems, notes = mpi.COMM_WORLD.bcast((run_checks(PROBLEMS, facts), run_checks(NOTES, facts)))
    report["problems"] = [asdict(problem) for problem in problems]
    report["notes"] = [asdict(note) for note in notes]
    return report


def _with_mpi(mpi: Any, here: dict[str, Any], probed: cuda_aware.Awareness | None, report: dict[str, Any]) -> Facts:
    """Fill in the entries that need MPI, and return what the checks need. Collective."""
    world, path = mpi.COMM_WORLD, library()
    vendor = mpi.get_vendor()[0]
    report["mpi"] = probes.describe_mpi(mpi, path)
    aware = cuda_aware.cuda_aware(vendor, path, version=mpi.Get_library_version(), probed=probed)
    report["cuda_aware"] = world.bcast(aware._asdict())

    ranks = gather_ranks(mpi, here, report["mpi"]["version"])
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
    transports = detect_transports(vendor, mpi.Get_library_version(), files(), cards)
    fork = fork_safety(probes.start_method(), transports, cards)
    report["transports"], report["fork"] = world.bcast((asdict(transports), asdict(fork)))
    facts = Facts(
        ranks=ranks,
        launcher=None if here["launcher"] is None else here["launcher"].name,
        wheels=probes.wheels(),
        origin=report["mpi"]["origin"],
        thread_level=report["mpi"]["thread_level"],
        singletons=launcher.singletons(None, world.size, "openmpi" if vendor == "Open MPI" else "mpich"),
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
