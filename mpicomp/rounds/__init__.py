"""Rounds: the communication that schemes ask of transports, groups of ranks, and running generators. No MPI."""

from mpicomp.rounds.drive import Returned, advance, drive, observe
from mpicomp.rounds.group import ACROSS, HOST, WORLD, Group, layout_groups, parts_of
from mpicomp.rounds.round import Pending, Request, Round, Rounds, dense_ring_bytes, gather_rows

__all__ = [
    "ACROSS",
    "HOST",
    "WORLD",
    "Group",
    "Pending",
    "Request",
    "Returned",
    "Round",
    "Rounds",
    "advance",
    "dense_ring_bytes",
    "drive",
    "gather_rows",
    "layout_groups",
    "observe",
    "parts_of",
]
