"""The transport for the ``comm`` that users pass, and checks of it before anything is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpicomp.errors import ConfigurationError, LaunchError
from mpicomp.job import abort
from mpicomp.mpi.rounds import Group, Rounds
from mpicomp.mpi.transport import Transport, Value, wait

_EXPECTED = "comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD"


def connect(comm: Any = None) -> Transport:
    """Return a new transport of a communicator; a transport is returned unchanged. Collective over ``comm``.

    Call it before any check that may fail on one rank alone: from then on a rank that fails ends the job. Another
    ``comm`` is a `ConfigurationError`, before anything is sent; a call before MPI_Init or after MPI_Finalize is a
    `LaunchError`.
    """
    if isinstance(comm, Transport):
        return comm
    from mpi4py import MPI  # starts MPI, which import mpicomp must not

    from mpicomp.mpi.comm import MPITransport

    # A call of MPI would end this process without a message.
    if not MPI.Is_initialized():
        raise LaunchError(
            "mpi: MPI is not initialized, since mpi4py.rc.initialize is False; call MPI.Init_thread() first, or "
            "leave that setting out"
        )
    if MPI.Is_finalized():
        raise LaunchError("mpi: MPI is finalized and cannot be initialized again; do this before MPI.Finalize()")
    abort.install()  # for a program that has called MPI_Init itself, after the import
    if comm is not None:
        _check_comm(comm)
    return MPITransport(comm)


@contextmanager
def connected(comm: Any) -> Iterator[Transport]:
    """Yield a transport like `connect`; where the block fails, a new one is closed. Collective over ``comm``."""
    transport = connect(comm)
    try:
        yield transport
    except BaseException:
        if transport is not comm:
            transport.close()
        raise


def run_over(comm: Any, rounds: Callable[[Group], Rounds[Value]]) -> Value:
    """Run rounds over ``comm``. Collective."""
    with connected(comm) as transport:
        value = transport.run(rounds(transport.group))
    if transport is not comm:
        transport.close()
    return value


def split(comm: Any, color: int, key: int) -> Any:
    """Return the communicator of the ranks of ``comm`` with the same color, in the order of their keys. Collective."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD if comm is None else comm
    wait(comm.Ibarrier().Test)  # Split keeps a core busy until all ranks are here
    return comm.Split(color, key)


def _check_comm(comm: Any) -> None:
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise ConfigurationError(
            f"mpi: {_EXPECTED}, got {_describe(comm)}; comm=None is all ranks, and MPI.COMM_WORLD.Split(color, key) "
            "makes one of some of them"
        )
    if comm == MPI.COMM_NULL:
        raise ConfigurationError(
            f"mpi: {_EXPECTED}, got COMM_NULL, which Split(MPI.UNDEFINED) returns on ranks outside of all "
            "parts, and which is left of a communicator after Free(); ranks outside exchange nothing, and Free() comes "
            "after the last use"
        )
    try:
        is_inter = comm.Is_inter()
    except MPI.Exception as error:
        raise ConfigurationError(
            f"mpi: {_EXPECTED}, got one that MPI does not know any more ({error}); call Free() after the last use"
        ) from None
    if is_inter:
        raise ConfigurationError(
            f"mpi: {_EXPECTED}, got an intercommunicator, whose two groups would be averaged apart or not at all; "
            "comm.Merge() makes an intracommunicator of both"
        )


def _describe(comm: Any) -> str:
    if any(cls.__name__ == "ProcessGroup" and cls.__module__.startswith("torch") for cls in type(comm).__mro__):
        return f"a process group of torch ({type(comm).__name__})"
    return f"{comm!r:.60} ({type(comm).__name__})"
