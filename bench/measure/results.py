"""Output of benchmarks: rows as tables and files, with the environment in which they were measured."""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from mpicomp._version import __version__
from mpicomp.job import abort, plural, variables, whole_file
from mpicomp.mpi.rounds import Group

SCHEMA = 1

_VARIABLES = ("MPIR_CVAR_", "UCX_", "OMP_", "FI_", "MPICOMP_")
"""Prefixes of environment variables that change the behavior of MPI."""
_MORE_VARIABLES = (
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_coll", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_mpi_yield_when_idle"),
    *("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND_TYPE"),
)


class Written(TypedDict):
    """The JSON object of a benchmark."""

    schema: Annotated[int, "version of these tables, 1"]
    environment: Annotated[dict[str, Any], "where it was measured"]
    rows: Annotated[list[dict[str, Any]], "one for each that was measured"]


class Job(TypedDict):
    """The MPI job of a benchmark."""

    mpi: Annotated[str, "whose library it is"]
    mpi_version: Annotated[str, "its version"]
    ranks: Annotated[int, "that took part"]
    hosts: Annotated[int, "that they are on"]
    oversubscribed: Annotated[bool, "whether some host has more ranks than cores"]
    lab: Annotated[bool, "whether it was an emulated cluster"]
    variables: Annotated[dict[str, Any], "variables of MPI, UCX, OpenMP, Slurm and mpicomp, without paths"]


class Environment(TypedDict):
    """The environment of a benchmark: nothing that reveals who measured when."""

    mpicomp: Annotated[str, "version"]
    python: Annotated[str, "version"]
    numpy: Annotated[str | None, "version"]
    numba: Annotated[str | None, "version"]
    torch: Annotated[str | None, "version; null where it is not installed"]
    cupy: Annotated[str | None, "version; null without `--device gpu`"]
    cpu: Annotated[str, "the processor's name"]
    cores: Annotated[int, "that this process may use"]
    threads: Annotated[int, "that were asked for"]
    device: Annotated[str, "`cpu`, or the name of the GPU"]
    job: Annotated[Job | None, "the MPI job; null where no ranks took part"]


def job_environment(group: Group) -> Job:
    """Return the environment that the seconds of an MPI job depend on, as this rank sees it. Not collective."""
    mpi = abort.communicator_alive()
    vendor, version = ("none", ()) if mpi is None else mpi.get_vendor()
    cores = len(os.sched_getaffinity(0))
    # In a lab every host takes the machine's cores for its own, and only the lab knows better.
    naps = variables.flag_or_none("MPICOMP_NAPS") is True
    shown = {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_VARIABLES) or name in _MORE_VARIABLES) and os.sep not in value
    }
    return {
        "mpi": vendor,
        "mpi_version": ".".join(map(str, version)),
        "ranks": group.size,
        "hosts": group.hosts,
        "oversubscribed": group.sharing > cores or naps,
        "lab": os.environ.get("MPICOMP_LAB") == "1",
        "variables": shown,
    }


def begin(command: str, task: str, group: Group, device: str) -> tuple[Job, Callable[[str], None]]:
    """Print ranks, machine and MPI of a benchmark on rank 0; return the job, and a function that prints comments there.

    Programs that read OSU's format skip comments.
    """
    job = job_environment(group)

    def print_root(text: str) -> None:
        if group.rank == 0:
            print(f"# {text}", flush=True)

    where = f"{task}{plural(group.size, 'rank')} on {plural(group.hosts, 'host')}"
    print_root(f"mpicomp {command}: {where}, {job['mpi']} {job['mpi_version']}".rstrip())
    if device != "cpu":
        print_root(f"gradients are in the memory of GPUs; rank 0 has one {device}")
    if job["oversubscribed"]:
        print_root("more ranks than cores: seconds of computation, and of waiting for it, are not a cluster's")
    return job, print_root


def write(
    path: str,
    rows: Sequence[Mapping[str, Any]],
    threads: int,
    device: str = "cpu",
    job: Job | None = None,
) -> None:
    """Write rows and their environment, of versions and the processor, as one JSON object."""

    def version(name: str) -> str | None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
        return None

    environment: Environment = {
        "mpicomp": __version__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "torch": version("torch"),
        "cupy": getattr(sys.modules.get("cupy"), "__version__", None),  # its packages have many names
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "device": device,
        "job": job,
    }
    with whole_file(path) as file:
        json.dump({"schema": SCHEMA, "environment": environment, "rows": rows}, file, indent=1)
        file.write("\n")


def show(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print a table."""
    cells = [["" if row[name] is None else format(row[name], form) for name, form in columns.items()] for row in rows]
    print(plain(list(columns), cells, [form == "" for form in columns.values()]), flush=True)


def plain(header: Sequence[str], cells: Sequence[Sequence[str]], left: Sequence[bool]) -> str:
    """Lay out a table in plain text.

    >>> print(plain(["name", "copies"], [["memcpy", "1.00"], ["topk.compress", "12.50"]], [True, False]))
    name           copies
    memcpy           1.00
    topk.compress   12.50
    """
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    forms = [f"{{:{'<' if flush else '>'}{width}}}" for width, flush in zip(widths, left, strict=True)]
    return "\n".join("  ".join(forms).format(*line).rstrip() for line in [header, *cells])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
