"""Compressed gradient exchange for data-parallel training, native to MPI."""

from mpicomp._version import __version__ as __version__
