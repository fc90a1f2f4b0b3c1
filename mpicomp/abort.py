"""Moved to `mpicomp.system.abort`; what was public here still works, with a warning."""

from mpicomp.deprecation import moved

__getattr__ = moved(__name__, "mpicomp.system.abort")
