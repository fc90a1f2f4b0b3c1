"""The launcher of this process: its name, the number of ranks, and this rank, from environment variables.

Everything here reads environment variables and nothing else, so it works before MPI is initialised and where
no MPI is installed. A communicator counts once there is one; the launcher's variables serve until then,
and show where the two disagree.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Slurm numbers the steps that srun starts from 0; from here on the numbers stand for the batch script, the
# external step and the interactive shell of salloc, in which a plain python is one process and no rank.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0

# Variables of the number of ranks, the rank, and the rank among those of its host; inner launchers come before outer
# ones: mpiexec is started inside of torchrun's processes, and torchrun in srun's. Scripts set RANK and WORLD_SIZE, too.
_VARIABLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "openmpi": (("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    "pmi": (("PMI_SIZE",), ("PMI_RANK", "PMI_ID"), ("MPI_LOCALRANKID", "SLURM_LOCALID")),
    "torchrun": (("WORLD_SIZE",), ("RANK",), ("LOCAL_RANK",)),
    "horovod": (("HOROVOD_SIZE",), ("HOROVOD_RANK",), ("HOROVOD_LOCAL_RANK",)),
    "slurm": (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_PROCID",), ("SLURM_LOCALID",)),
    "pmix": (("PMIX_SIZE",), ("PMIX_RANK",), ()),
    "torch": (("WORLD_SIZE",), ("RANK",), ("LOCAL_RANK",)),
}


@dataclass(frozen=True)
class Problem:
    """Something that keeps a job from running well, and its remedy."""

    what: str
    fix: str


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, the number of ranks, and this rank's place."""

    # "hydra" (MPICH and its relatives), "openmpi", "slurm", "pmi" or "pmix" (others that speak this protocol); or one
    # that offers MPI nothing: "torchrun" (and accelerate), "horovod", "torch" (others that set RANK and WORLD_SIZE).
    name: str
    size: int  # number of processes that were started together
    rank: int  # number of this process, from 0
    local_rank: int | None = None  # the same among those of this host; None if the launcher does not tell


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = environ.get(name, "").strip()
        if value.isascii() and value.isdigit():
            return int(value)
    return None


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return which launcher started this process; of several that have left their variables, the innermost.

    >>> detect({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"})
    Launch(name='hydra', size=4, rank=3, local_rank=1)
    >>> detect({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    True
    """
    for name, variables in _VARIABLES.items():
        size, rank, local_rank = (_number(environ, *names) for names in variables)
        if size is None or rank is None or rank >= size:
            continue
        if name == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ:
            continue
        if name == "slurm":
            # SLURM_NTASKS alone means nothing: a batch script and the shell of salloc have it as well, set to
            # the number requested. Only srun starts a step, and a step has a number.
            step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
            if step is None or step >= _SLURM_SPECIAL_STEPS:
                continue
        if name == "pmi":
            # Slurm's pmi2 plugin sets PMI_RANK and PMI_SIZE too, but never Hydra's names for the local ranks; Hydra
            # inside an allocation finds Slurm's variables set, and adds its own.
            name = "hydra" if "MPI_LOCALRANKID" in environ else "slurm" if "SLURM_PROCID" in environ else "pmi"
        return Launch(name, size, rank, local_rank)
    return None


def ranks_of_host(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of the job's ranks on this host; 1 if the launcher does not tell.

    >>> ranks_of_host({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    4
    """
    return _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") or 1


def describe(launch: Launch) -> str:
    """Name a launcher for people."""
    names = {
        "hydra": "mpiexec of MPICH",
        "openmpi": "mpirun of Open MPI",
        "slurm": "srun",
        "torchrun": "torchrun",
        "horovod": "horovodrun",
        "torch": "a launcher that sets RANK and WORLD_SIZE",
    }
    return names.get(launch.name, f"a launcher that speaks {launch.name.upper()}")


def start_line(launch: Launch, mpi: str, python: str = sys.executable, command: Sequence[str] = ()) -> str:
    """Return the line that starts the same job with a launcher that the MPI library understands; see `singletons`."""
    words = shlex.join(command or sys.orig_argv)
    if launch.name == "slurm":
        start = f"srun --mpi={'pmix' if mpi == 'openmpi' else 'pmi2'}"
    else:
        start = shlex.quote(os.path.join(os.path.dirname(python), "mpiexec"))
    return f"{start} -n {launch.size} {words}"


def singletons(
    comm_size: int,
    mpi: str = "mpich",
    environ: Mapping[str, str] = os.environ,
    python: str = sys.executable,
    command: Sequence[str] = (),
) -> Problem | None:
    """Return the problem if N processes were started and every one of them is rank 0 of 1.

    This happens without an error when the launcher and the MPI library do not speak the same protocol, and with
    launchers that speak no protocol of MPI.

    >>> srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
    >>> singletons(1, "mpich", srun, "/env/bin/python", ["python", "train.py"]).fix
    'srun --mpi=pmi2 -n 4 python train.py'
    >>> singletons(4, "mpich", srun) is None
    True
    """
    launch = detect(environ)
    if launch is None or launch.size <= 1 or comm_size != 1:
        return None
    library = {"mpich": "MPICH", "openmpi": "Open MPI"}.get(mpi, mpi)
    offered = "PMIx" if "PMIX_RANK" in environ else "PMI" if {"PMI_RANK", "PMI_ID"} & set(environ) else None
    if offered is None:
        why = "no PMI is offered, as by srun --mpi=none" if launch.name == "slurm" else "no PMI is offered"
    else:
        why = f"{offered} is offered, and {library} wants {'PMIx' if mpi == 'openmpi' else 'PMI'}"
    return Problem(
        f"{describe(launch)} started {launch.size} processes, but each of them is rank 0 of 1: "
        f"{library} did not understand this launcher, so {launch.size} separate jobs are running ({why})",
        start_line(launch, mpi, python, command),
    )
