"""The only layer that calls MPI: it runs the rounds that schemes ask for."""

from mpicomp.transport.base import RoundLog, Transport
from mpicomp.transport.local import LocalWorld

__all__ = ["LocalWorld", "RoundLog", "Transport"]
