"""The only layer that calls MPI: it runs the rounds that schemes ask for."""

from mpicomp.mpi.local import LocalWorld
from mpicomp.mpi.transport import RoundLog, Transport

__all__ = ["LocalWorld", "RoundLog", "Transport"]
