"""Ranks as the doctor gathers them, for tests that need many and different ones."""

from mpicomp.doctor.ranks import Rank
from mpicomp.system.gpus import Gpu

VERSIONS = ("mpi_version", "python_version", "mpicomp", "mpi4py", "numpy", "numba", "torch")


def rank(number, leader=0, host="a", cpus=(0, 1), gpu=None, versions=(), **fields):
    """Give a rank with one thread and nothing wrong; `gpu` is the number of its device."""
    device = None if gpu is None else Gpu(str(gpu), "H200", f"GPU-{host}{gpu}")
    ordinary = {"threads": 1, "threads_from": "OMP_NUM_THREADS=1", "cpus_per_task": None, "gpu_mask": None}
    ordinary |= {"gpu_error": None, "unresolved": (), "versions": {**dict.fromkeys(VERSIONS, "1"), **dict(versions)}}
    return Rank(rank=number, leader=leader, host=host, cpus=tuple(cpus), device=device, **{**ordinary, **fields})
