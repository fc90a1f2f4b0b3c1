"""The MPI library of this process: its file, and whether it may be given pointers to GPU memory.

A wrong yes ends in a segmentation fault and a wrong no in a copy through the host: only a certain yes is one.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpicomp.job import variables

_OVERRIDE = "MPICOMP_CUDA_AWARE"
_ADVICE = f"{_OVERRIDE}=1 overrules this"
_OFF = ("0", "false", "no", "off", "disable", "disabled")
# Variables that launchers set for the processes of a job, which the child is not one of.
_LAUNCHERS = ("PMI", "PMIX_", "OMPI_COMM_", "OMPI_FILE_", "MPI_LOCAL", "HYD", "PRTE_", "SLURM_", "PALS_")
# libmpi.so.12, libmpi_abi.so.1, libmpich.so.12, libmpi_gnu_123.so.12 (Cray), but not libmpicxx or libmpi_cxx,
# libmpi_mpifh and their like, which only stand on it.
_LIBRARY = re.compile(r"/(libmpi|libmpi_abi|libmpich|libmpi_(gnu|cray|intel|nvidia)\w*)\.(so|dylib)[.\d]*$")
NO_GPU = 3  # exit status of a probe that found no GPU to try it with
PROBE = "mpicomp.gpu.routes"


class Awareness(NamedTuple):
    """Whether MPI takes pointers to GPU memory, and the evidence for it."""

    value: bool
    reason: str


def cuda_aware(
    vendor: str | None,
    path: str | None,
    environ: Mapping[str, str] = os.environ,
    version: str = "",
    loaded: Iterable[str] | None = None,
    probed: Awareness | None = None,
) -> Awareness:
    """Return whether the MPI library may be given pointers to GPU memory, and the evidence for it.

    The first of these that knows is believed: ``MPICOMP_CUDA_AWARE=0/1``; settings that turn it off; a probe that
    failed; the loaded library; Cray's and Open MPI's own ways. If none knows, it is no. ``vendor`` and ``version``
    come from ``mpi4py.MPI``, ``path`` is the library's file, ``loaded`` has the lines of a ``/proc/self/maps``,
    ``probed`` is the result of `probe` before MPI was initialized.

    >>> cuda_aware("MPICH", None, {"MPICOMP_CUDA_AWARE": "1"})
    Awareness(value=True, reason='set by MPICOMP_CUDA_AWARE=1')
    """
    asked = environ.get(_OVERRIDE, "").strip()
    wanted = variables.flag_or_none(_OVERRIDE, environ)
    if wanted is not None:
        return Awareness(wanted, f"set by {_OVERRIDE}={asked}")
    if asked:
        return Awareness(False, f"{_OVERRIDE} must be 0 or 1, got '{asked}', which counts as 0")
    if vendor is None or path is None:
        return Awareness(False, f"which MPI library is loaded is not known; {_ADVICE}")
    cray = "CRAY" in f"{vendor} {version}".upper()
    off = _turned_off(vendor, cray, environ)
    if off is not None:
        return Awareness(False, off)
    if probed is not None and not probed.value:
        return probed
    seconded = "" if probed is None else f", and {probed.reason}"
    answer = _query(path)
    if answer is not None:
        return Awareness(answer, f"the loaded {vendor} library was asked{seconded}")
    if cray and any("libmpi_gtl_cuda" in path for path in files(loaded)):
        return Awareness(True, f"MPICH_GPU_SUPPORT_ENABLED=1, and Cray's libmpi_gtl_cuda is loaded{seconded}")
    if vendor == "Open MPI":
        answer = _ompi_info(path)
        if answer is not None:
            return Awareness(answer, f"ompi_info was asked{seconded}")
    # A probe has sent to itself alone: the way to others may be one that knows no GPUs.
    alone = "" if probed is None else f" ({probed.reason}, which proves nothing about other ranks)"
    return Awareness(False, f"the library does not report it{alone}; {_ADVICE}")


def _turned_off(vendor: str, cray: bool, environ: Mapping[str, str]) -> str | None:
    if cray and environ.get("MPICH_GPU_SUPPORT_ENABLED", "").strip() != "1":
        return _needs("Cray MPICH", "MPICH_GPU_SUPPORT_ENABLED", environ)
    if vendor.startswith("MVAPICH") and not any(
        environ.get(name, "").strip() == "1" for name in ("MV2_USE_CUDA", "MVP_USE_CUDA")
    ):
        name = "MVP_USE_CUDA" if "MVP_USE_CUDA" in environ else "MV2_USE_CUDA"
        return _needs("MVAPICH", name, environ)
    if vendor == "Intel MPI" and environ.get("I_MPI_OFFLOAD", "0").strip() in ("", "0"):
        return _needs("Intel MPI", "I_MPI_OFFLOAD", environ)
    switches = ["MPIR_CVAR_ENABLE_GPU"]
    if vendor == "Open MPI":
        switches = ["OMPI_MCA_opal_cuda_support", "OMPI_MCA_mpi_cuda_support"]
    for name in switches:
        if environ.get(name, "").strip().lower() in _OFF:
            return f"{name}={environ[name]} turns it off"
    if not _ucx_takes_cuda(environ.get("UCX_TLS", "all")):
        return f"UCX_TLS={environ['UCX_TLS']} leaves out cuda"
    return None


def _needs(library: str, name: str, environ: Mapping[str, str]) -> str:
    found = f"it is {environ[name]!r}" if environ.get(name) else "it is not set"
    return f"{library} takes GPU memory with {name}=1 only, and {found}"


def _ucx_takes_cuda(transports: str) -> bool:
    without = transports.strip().startswith("^")
    names = [name.strip().lstrip("\\") for name in transports.strip().lstrip("^").split(",")]
    named = any(name in ("cuda", "cuda_copy") for name in names)
    return not named if without else named or "all" in names


def _query(path: str) -> bool | None:
    try:
        library = ctypes.CDLL(path)  # loaded already: this gives the same copy
    except OSError:
        return None
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI and MPICH
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # relatives of MPICH; 0 stands for CUDA
        answer = ctypes.c_int(0)
        if library.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0:
            return bool(answer.value)
    return None


def files(maps: Iterable[str] | None = None) -> list[str]:
    """Return the paths of the files that are mapped into this process, libraries among them."""
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return []
    return list(dict.fromkeys(path[0] for line in maps if (path := line.split(maxsplit=5)[5:])))


def library(maps: Iterable[str] | None = None) -> str | None:
    """Return the path of the MPI library that is loaded into this process.

    >>> library(["7f00-7f01 r-xp 00000000 08:01 42    /opt/mpi/lib/libmpi.so.40.40.7"])
    '/opt/mpi/lib/libmpi.so.40.40.7'
    """
    return next((path for path in files(maps) if _LIBRARY.search(path)), None)


def _ompi_info(path: str) -> bool | None:
    tool = Path(path).parent.parent / "bin" / "ompi_info"
    try:
        command = [str(tool), "--parsable", "--all"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"opal_built_with_cuda_support:value:(true|false)", text)
    return None if found is None else found[1] == "true"


def probe(
    command: Sequence[str] = (sys.executable, "-m", PROBE),
    environ: Mapping[str, str] = os.environ,
    timeout_s: float = 60.0,
) -> Awareness | None:
    """Have a child process pass MPI a pointer to GPU memory, and return the result.

    The child is an MPI job of one rank, so a failure is certain, and a success proves nothing about the way to other
    ranks. Call it before MPI is initialized, and on one rank of a host.

    >>> probe([sys.executable, "-c", "import os; os.abort()"])
    Awareness(value=False, reason='a child process that gave it GPU memory was ended by SIGABRT')
    """
    child_environ = {name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS)}
    try:
        ended = subprocess.run(
            command, env=child_environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except OSError as error:
        return Awareness(False, f"a child process that was to try it did not start: {error}")
    except subprocess.TimeoutExpired:
        return Awareness(False, f"a child process that gave it GPU memory had not ended after {timeout_s:g} s")
    if ended.returncode == 0:
        return Awareness(True, "a child process that gave it GPU memory got it back")
    if ended.returncode == NO_GPU:
        return None
    how = f"ended with status {ended.returncode}"
    if ended.returncode < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"was ended by {names.get(-ended.returncode, f'signal {-ended.returncode}')}"
    return Awareness(False, f"a child process that gave it GPU memory {how}")
