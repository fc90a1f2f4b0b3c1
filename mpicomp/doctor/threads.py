"""The number of threads that a rank computes with."""

from __future__ import annotations

from collections.abc import Mapping


def count(environ: Mapping[str, str], cpus: int) -> tuple[int, str]:
    """Return the number of threads, and the setting that it comes from.

    Parameters
    ----------
    environ
        The environment.
    cpus
        How many the process may run on: the libraries start so many threads where nobody says otherwise.

    Examples
    --------
    >>> count({"OMP_NUM_THREADS": "4"}, 16)
    (4, 'OMP_NUM_THREADS=4')
    >>> count({}, 16)
    (16, 'OMP_NUM_THREADS is not set')
    """
    said = environ.get("OMP_NUM_THREADS", "")
    first = said.partition(",")[0].strip()  # a list names the numbers of nested levels
    if first.isascii() and first.isdigit() and int(first) > 0:
        return int(first), f"OMP_NUM_THREADS={said}"
    return cpus, "OMP_NUM_THREADS is not set"


def of_task(environ: Mapping[str, str]) -> int | None:
    """Return the number of CPUs of a task according to Slurm, None where it does not say."""
    said = environ.get("SLURM_CPUS_PER_TASK", "").strip()
    return int(said) if said.isascii() and said.isdigit() and int(said) > 0 else None
