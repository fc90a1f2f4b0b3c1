"""Which MPI library is loaded, where it comes from, and whether MPI can be started with it."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from mpicomp.doctor.installed import wheels
from mpicomp.system import launcher
from mpicomp.system.launcher import Problem

_INSTALL = "pip install 'mpicomp[mpich]', or load the MPI module of your site"


def origin(path: str) -> str:
    """Return the origin of an MPI library: ``"wheel mpich 5.0.2"`` or ``"system"``."""
    for name, version in wheels().items():
        for file in importlib.metadata.files(name) or ():
            if Path(str(file.locate())).resolve() == Path(path).resolve():
                return f"wheel {name} {version}"
    return "system"


def load(launch: launcher.Launch | None) -> tuple[Any, Problem | None]:
    """Return mpi4py.MPI with MPI initialised, or the problem that keeps it from that."""
    try:
        import mpi4py
    except ImportError:
        return None, Problem("mpi4py is not installed", _INSTALL)
    # MPICH that cannot speak to a PMIx launcher ends the process in MPI_Init, with a message for its own
    # developers. A session can be told to return the error instead.
    doubtful = launch is not None and "PMIX_RANK" in os.environ and "mpi4py.MPI" not in sys.modules
    if doubtful:
        mpi4py.rc(initialize=False, finalize=True)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # The first line says that nothing was found, the others each name that was tried.
        reason = str(error).split("\n")[0]
        return None, Problem(f"mpi4py finds no MPI library: {reason}", _INSTALL)
    if doubtful and launch is not None:
        vendor = MPI.get_vendor()[0]
        if vendor == "MPICH" and MPI.Get_version() >= (4, 0):
            try:
                MPI.Session.Init(MPI.INFO_NULL, MPI.ERRORS_RETURN).Finalize()
            except MPI.Exception as error:
                reason = str(error).strip().split("\n")[-1].rpartition("): ")[2].strip()
                what = f"{vendor} cannot start under {launcher.describe(launch)}: {reason}"
                return None, Problem(what, launcher.start_line(launch, "mpich"))
        MPI.Init_thread()
    return MPI, None


def describe(mpi: Any, path: str | None) -> dict[str, Any]:
    """Return the entry ``mpi`` of the report."""
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    vendor, version = mpi.get_vendor()
    return {
        "vendor": f"{vendor} {'.'.join(map(str, version))}",
        "library": path,
        "origin": None if path is None else origin(path),
        # MPICH's first line has tabs in it, and others end with a zero byte.
        "version": " ".join(mpi.Get_library_version().strip("\0").split("\n")[0].split()),
        "standard": ".".join(map(str, mpi.Get_version())),
        "thread_level": levels[mpi.Query_thread()],
    }


def thread_notes(level: str) -> list[Problem]:
    """Notice a thread level with which nothing goes on beside the computation."""
    if level in ("serialized", "multiple"):
        return []
    return [
        Problem(
            f"the thread level is {level}: exchange cannot overlap with computation",
            "leave mpi4py.rc.thread_level alone, and use an MPI library built with threads",
        )
    ]


def launcher_notes(origin: str | None) -> list[Problem]:
    """Notice that typing ``mpiexec`` would start another MPI's."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = shutil.which("mpiexec")
    if not origin or origin == "system" or found is None:
        return []
    if not beside.exists() or Path(found).resolve() == beside.resolve():
        return []
    return [
        Problem(
            f"mpiexec on the PATH is {found}, but MPI comes from the {origin}",
            f"start jobs with {shlex.quote(str(beside))}",
        )
    ]
