"""Inspection of the environment of an MPI job: library, launcher, hosts, GPUs, and the problems found with them.

`local` looks at one process without MPI, `examine` at the whole job. `mpicomp doctor` prints the result; the
pieces are there for others too, `cuda_aware` above all.
"""

from mpicomp.doctor.formatting import render
from mpicomp.doctor.job import SCHEMA, examine, local
from mpicomp.doctor.probes import origin, packages, wheels
from mpicomp.system.cuda_aware import cuda_aware, library

__all__ = ["SCHEMA", "cuda_aware", "examine", "library", "local", "origin", "packages", "render", "wheels"]
