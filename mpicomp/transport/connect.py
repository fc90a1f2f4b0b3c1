"""The transport for the ``comm`` that users pass."""

from typing import Any

from mpicomp.system import abort
from mpicomp.transport.base import Transport


def connect(comm: Any = None) -> Transport:
    """Return the transport of a communicator, a new one; a transport is returned as it is. Collective over ``comm``.

    It comes before anything is looked at that may be wrong on one rank alone: from then on a rank that fails ends the
    job, and the others can be told.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Raises
    ------
    ConfigurationError
        Where ``comm`` is something else: nothing was sent then.
    LaunchError
        Where MPI has not begun in this process, or is over.
    """
    if isinstance(comm, Transport):
        return comm
    from mpicomp.transport.mpi import MPITransport  # starts MPI, which import mpicomp must not
    from mpicomp.transport.mpi_comm import check_begun, check_comm

    check_begun()
    abort.install()  # where the program itself has begun MPI after the import
    if comm is not None:
        check_comm(comm)
    return MPITransport(comm)
