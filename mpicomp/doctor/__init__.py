"""Inspection of the environment of an MPI job: library, launcher, hosts, GPUs, and the problems found with them.

`mpicomp doctor` prints what `examine` returns.
"""

from mpicomp.doctor.formatting import render
from mpicomp.doctor.job import SCHEMA, examine
from mpicomp.system.cuda_aware import cuda_aware, library

__all__ = ["SCHEMA", "cuda_aware", "examine", "library", "render"]
