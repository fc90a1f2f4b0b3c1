"""Checks of the communicator that a user passes, and of MPI itself, before anything is sent."""

from typing import Any

from mpi4py import MPI

from mpicomp.errors import ConfigurationError, LaunchError

_WANTED = "comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD"
_PARTS = "comm=None is all ranks, and MPI.COMM_WORLD.Split(color, key) makes one of some of them"


def check_begun() -> None:
    """Refuse to go on where a call of MPI would end this process without a word."""
    if not MPI.Is_initialized():
        raise LaunchError(
            "mpi: MPI has not begun in this process, since mpi4py.rc.initialize is False; call MPI.Init_thread() "
            "first, or leave that setting out"
        )
    if MPI.Is_finalized():
        raise LaunchError(
            "mpi: MPI has come to its end in this process and cannot begin again; do this before MPI.Finalize()"
        )


def check_comm(comm: Any) -> None:
    """Refuse what is no communicator whose ranks can exchange."""
    if not isinstance(comm, MPI.Comm):
        raise ConfigurationError(f"mpi: {_WANTED}, got {_described(comm)}; {_PARTS}")
    if comm == MPI.COMM_NULL:
        raise ConfigurationError(
            f"mpi: {_WANTED}, got COMM_NULL, which is what Split(MPI.UNDEFINED) returns on ranks outside of all parts, "
            "and what is left of a communicator after Free(); ranks outside exchange nothing, and Free() comes after "
            "the last use"
        )
    try:
        between = comm.Is_inter()
    except MPI.Exception as error:
        raise ConfigurationError(
            f"mpi: {_WANTED}, got one that MPI does not know any more ({error}); call Free() after the last use"
        ) from None
    if between:
        raise ConfigurationError(
            f"mpi: {_WANTED}, got an intercommunicator, whose two groups would be averaged apart or not at all; "
            "comm.Merge() makes an intracommunicator of both"
        )


def _described(comm: Any) -> str:
    if any(cls.__name__ == "ProcessGroup" and cls.__module__.startswith("torch") for cls in type(comm).__mro__):
        return f"a process group of torch ({type(comm).__name__})"
    return f"{comm!r:.60} ({type(comm).__name__})"
