"""The transport for the ``comm`` that users pass."""

from typing import Any

from mpicomp.transport.base import Transport


def connect(comm: Any = None) -> Transport:
    """Return the transport of a communicator, a new one; a transport is returned as it is. Collective over ``comm``.

    It comes before anything is looked at that may be wrong on one rank alone: from then on a rank that fails ends the
    job, and the others can be told.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.
    """
    if isinstance(comm, Transport):
        return comm
    from mpicomp.transport.mpi import MPITransport  # starts MPI, which import mpicomp must not

    return MPITransport(comm)
