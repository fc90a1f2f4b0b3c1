"""Arrays in, arrays out: the sweeps over memory that compression is made of.

Nothing here knows of MPI, torch or state. `cpu` holds the Numba kernels; a GPU module offers the same
names with the same signatures and results. Importing this package compiles nothing.
"""
