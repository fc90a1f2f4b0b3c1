"""The GPU of a process: from the launcher's word and the mask, before there is an MPI."""

import subprocess
import sys

import pytest

from mpicomp.errors import LaunchError
from mpicomp.job import gpus

FOUR = "".join(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index}{index}aa)\n" for index in range(4))
TWO = "".join(FOUR.splitlines(keepends=True)[:2])


def slurm(rank, local, **more):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
    return step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)} | more


def hydra(rank, local):
    return {"PMI_SIZE": "8", "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(local), "MPI_LOCALNRANKS": "4"}


def openmpi(rank, local):
    words = {"SIZE": 8, "RANK": rank, "LOCAL_RANK": local, "LOCAL_SIZE": 4}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in words.items()}


PMIX = {"PMIX_SIZE": "4", "PMIX_RANK": "2"}
ALONE = [f"GPU 0: NVIDIA H200 (UUID: GPU-{rank}{rank}aa)\n" for rank in range(4)]
TAKEN = {  # environments, one or several listings, and the devices that processes take
    # The second host's ranks count from 0 again.
    **{f"in turn, {kind.__name__}": ([kind(rank, rank % 4) for rank in range(8)], FOUR, [0, 1, 2, 3] * 2)
       for kind in (slurm, hydra, openmpi)},
    "shared": ([slurm(rank, rank) for rank in range(4)], TWO, [0, 1, 0, 1]),
    "a plain process, and a batch script": ([{}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}], FOUR, [0, 0]),
    # What Slurm does where tasks are bound: each has another mask, or sees only its own device 0.
    "a mask a rank": ([slurm(rank, rank, CUDA_VISIBLE_DEVICES=str(rank)) for rank in range(4)], FOUR, [0] * 4),
    "alone": ([slurm(rank, rank, CUDA_VISIBLE_DEVICES="0") for rank in range(4)], ALONE, [0] * 4),
    "one mask": ([slurm(rank, rank, CUDA_VISIBLE_DEVICES="3,1") for rank in range(4)], FOUR, [0, 1, 0, 1]),
    "no local rank, but a mask": ([PMIX | {"CUDA_VISIBLE_DEVICES": "2"}], FOUR, [0]),
}  # fmt: skip


@pytest.mark.parametrize(("environments", "listed", "devices"), TAKEN.values(), ids=TAKEN)
def test_processes_take_devices(environments, listed, devices):
    listings = [listed] * len(environments) if isinstance(listed, str) else listed
    assert list(map(gpus.local_device, environments, listings)) == devices


def test_a_mask_shows_its_gpus():
    assert [gpu.index for gpu in gpus.visible({"CUDA_VISIBLE_DEVICES": "3,1"}, FOUR)] == ["3", "1"]


REFUSED = [
    ({}, "No devices were found\n", r"^gpu: .* nvidia-smi lists none on .*; ask the job for one"),
    *(({"CUDA_VISIBLE_DEVICES": mask}, FOUR, f"CUDA_VISIBLE_DEVICES='{mask}' hides every GPU of .*; unset it")
      for mask in ("", "-1", "NoDevFiles")),
    # It names what is not here: CUDA would leave it out, and the rank would have no GPU or another one.
    *((slurm(1, 1, CUDA_VISIBLE_DEVICES=mask), FOUR, f"={mask} names '.*', which this process does not have")
      for mask in ("4", "0,7", "GPU-ff", "G")),
    (PMIX, FOUR, r"speaks PMIX does not tell .* set CUDA_VISIBLE_DEVICES for each rank"),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "listed", "message"), REFUSED)
def test_what_leaves_no_gpu_is_refused(environment, listed, message):
    with pytest.raises(LaunchError, match=message):
        gpus.local_device(environment, listed)


def test_it_starts_no_mpi():
    code = (
        "import sys, mpicomp\n"
        "try:\n    mpicomp.local_device()\nexcept mpicomp.MpicompError:\n    pass\n"
        "assert not {'mpi4py.MPI', 'torch', 'cupy', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
