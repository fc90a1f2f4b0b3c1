"""Ranks as the doctor gathers them, for tests that need many and different ones."""

from mpicomp.doctor.ranks import Rank
from mpicomp.system.gpus import Gpu

VERSIONS = ("mpi_version", "python_version", "mpicomp", "mpi4py", "numpy", "numba", "torch")


def rank(number, leader=0, host="a", cpus=(0, 1), gpu=None, versions=(), **fields):
    """Return a rank with one thread and no problem; `gpu` is the number of its device."""
    device = None if gpu is None else Gpu(str(gpu), "H200", f"GPU-{host}{gpu}")
    defaults = {
        "device": device,
        "threads": 1,
        "threads_from": "OMP_NUM_THREADS=1",
        "cpus_per_task": None,
        "gpu_mask": None,
    }
    defaults |= {"gpu_error": None, "unresolved": (), "versions": {**dict.fromkeys(VERSIONS, "1"), **dict(versions)}}
    return Rank(rank=number, leader=leader, host=host, cpus=tuple(cpus), **{**defaults, **fields})
