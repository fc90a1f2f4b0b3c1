"""The processors that this process may use, before a library narrows its main thread to some of them.

``OMP_PROC_BIND=true`` has OpenMP bind the thread that loads it, as ``import torch`` does, to one place. Threads
that are made later inherit that, also those of ranks that no launcher has bound: all of them then share the first core.
"""

import ctypes
import os
import re
from collections.abc import Mapping

from mpicomp.job import launcher, print_stderr

_OPENMP = re.compile(r"/\S*lib(?:gomp|omp|iomp5)\b\S*\.so\S*")
_warned = False


def narrowed() -> tuple[set[int], set[int]] | None:
    """Return the processors of the main thread and those of the process, if OpenMP has narrowed the first."""
    if not hasattr(os, "sched_getaffinity") or not binds(os.environ):
        return None
    now, had = os.sched_getaffinity(os.getpid()), _places()
    return (now, had) if now < had else None


def _places() -> set[int]:
    found: set[int] = set()
    try:
        with open("/proc/self/maps") as file:
            paths = set(_OPENMP.findall(file.read()))
        for path in paths:
            library = ctypes.CDLL(path)
            for place in range(library.omp_get_num_places()):
                numbers = (ctypes.c_int * library.omp_get_place_num_procs(place))()
                library.omp_get_place_proc_ids(place, numbers)
                found |= set(numbers)
    except (OSError, AttributeError):  # a system without /proc, or a library of before OpenMP 4.5
        return set()
    return found


def binds(environ: Mapping[str, str]) -> bool:
    """Return whether OpenMP binds threads.

    >>> binds({"OMP_PROC_BIND": "close"}), binds({"OMP_PROC_BIND": "false"}), binds({"OMP_PLACES": "cores"}), binds({})
    (True, False, True, False)
    """
    bind = environ.get("OMP_PROC_BIND", "").strip().lower()
    return bind not in ("", "false") or (not bind and bool(environ.get("OMP_PLACES")))


def widen() -> None:
    """Restore the process's affinity for the calling thread (OpenMP narrows it); warn once."""
    global _warned
    found = narrowed()
    if found is None:
        return
    now, had = found
    os.sched_setaffinity(0, had)  # of the calling thread
    launch = launcher.detect()
    if not _warned and (launch is None or launch.rank in (None, 0)):
        _warned = True
        bind, places = (os.environ.get(name, "") for name in ("OMP_PROC_BIND", "OMP_PLACES"))
        print_stderr(
            f"OMP_PROC_BIND={bind} OMP_PLACES={places} has bound the main thread to {len(now)} of the "
            f"{len(had)} processors of this process; mpicomp's threads use all of these. Ranks that no launcher binds "
            "compute on the same ones: unset OMP_PROC_BIND, or bind ranks, as `mpiexec -bind-to core` and "
            "`srun --cpu-bind=cores` do"
        )
