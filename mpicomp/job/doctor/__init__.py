"""Inspection of the environment of an MPI job: library, launcher, hosts, GPUs, and the problems found with them.

`mpicomp doctor` prints the object that `examine` returns.
"""

from mpicomp.job.cuda_aware import cuda_aware, library
from mpicomp.job.doctor.examination import SCHEMA, examine
from mpicomp.job.doctor.formatting import render

__all__ = ["SCHEMA", "cuda_aware", "examine", "library", "render"]
