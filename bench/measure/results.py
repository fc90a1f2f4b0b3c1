"""Output of benchmarks: rows as tables and files, with the environment in which they were measured."""

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicomp._version import __version__
from mpicomp.job import abort, variables, whole_file
from mpicomp.mpi.rounds import Group

SCHEMA = 1

_WIDEST = 10_000  # letters, more than any table has

_VARIABLES = ("MPIR_CVAR_", "UCX_", "OMP_", "FI_", "MPICOMP_")
"""Prefixes of environment variables that change the behavior of MPI."""
_MORE_VARIABLES = (
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_coll", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_mpi_yield_when_idle"),
    *("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND_TYPE"),
)


WRITTEN = {
    "schema": ("integer", "version of these tables, 1"),
    "environment": ("object", "where it was measured"),
    "rows": ("list of objects", "one for each that was measured"),
}
"""Fields of the JSON object of a benchmark, with their types and meanings."""

ENVIRONMENT = {
    "mpicomp": ("string", "version"),
    "python": ("string", "version"),
    "numpy": ("string or null", "version"),
    "numba": ("string or null", "version"),
    "torch": ("string or null", "version; null where it is not installed"),
    "cupy": ("string or null", "version; null without `--device gpu`"),
    "cpu": ("string", "the processor's name"),
    "cores": ("integer", "that this process may use"),
    "threads": ("integer", "that were asked for"),
    "device": ("string", "`cpu`, or the name of the GPU"),
    "job": ("object or null", "the MPI job; null where no ranks took part"),
}
"""Fields of ``environment``: nothing that reveals who measured when."""

JOB = {
    "mpi": ("string", "whose library it is"),
    "mpi_version": ("string", "its version"),
    "ranks": ("integer", "that took part"),
    "hosts": ("integer", "that they are on"),
    "oversubscribed": ("boolean", "whether some host has more ranks than cores"),
    "lab": ("boolean", "whether it was an emulated cluster"),
    "variables": ("object", "variables of MPI, UCX, OpenMP, Slurm and mpicomp, without paths"),
}
"""Fields of ``job``."""


def job_environment(group: Group) -> dict[str, Any]:
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


def write(
    path: str,
    rows: Sequence[Mapping[str, Any]],
    threads: int,
    device: str = "cpu",
    job: Mapping[str, Any] | None = None,
) -> None:
    """Write rows and their environment, of versions and the processor, as one JSON object."""
    environment = {
        "mpicomp": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "numba", "torch")},
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
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        console = None
    else:
        console = Console()
    flat = plain(list(columns), cells, [form == "" for form in columns.values()])
    if console is None or not console.is_terminal:  # readers of a file or a pipe want no lines cut
        print(flat, flush=True)
        return
    table = Table()
    for name, form in columns.items():
        table.add_column(name, justify="left" if form == "" else "right")
    for line in cells:
        table.add_row(*line)
    if console.measure(table, options=console.options.update(width=_WIDEST)).maximum > console.width:
        print(flat, flush=True)  # a terminal breaks whole lines, which is easier to read than columns of a letter
    else:
        console.print(table)


def plain(header: Sequence[str], cells: Sequence[Sequence[str]], left: Sequence[bool]) -> str:
    """Lay out a table in plain text.

    >>> print(plain(["name", "copies"], [["memcpy", "1.00"], ["topk.compress", "12.50"]], [True, False]))
    name           copies
    memcpy           1.00
    topk.compress   12.50
    """
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(line, widths, left, strict=True)
        )
        for line in [header, *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


_READINGS = 1000  # readings of the clock, of which its resolution and its cost are taken


def clock() -> tuple[float, float]:
    """Return the clock's resolution and the seconds of timing nothing; both measured."""
    readings = [time.perf_counter() for _ in range(_READINGS)]
    steps = np.diff(readings)
    empty = []
    for _ in range(_READINGS):
        start = time.perf_counter()
        empty.append(time.perf_counter() - start)
    return float(steps[steps > 0].min()), float(np.median(empty))
