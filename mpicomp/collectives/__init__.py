"""Collectives: each turns the ranks' messages into the same mean on every rank. One file each, no MPI."""

from mpicomp.collectives.binding import bind, collective_class, fitting, list_collectives, variants
from mpicomp.collectives.scheme import COLLECTIVES, Exchange, Result, Scheme, gain_of
from mpicomp.compressors.context import Context

__all__ = [
    "COLLECTIVES",
    "Context",
    "Exchange",
    "Result",
    "Scheme",
    "bind",
    "collective_class",
    "fitting",
    "gain_of",
    "list_collectives",
    "variants",
]
