"""The GPU of a process: from the launcher's word and the mask, before there is an MPI."""

import subprocess
import sys

import pytest

from mpicomp.errors import LaunchError
from mpicomp.job import gpus

FOUR = "".join(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index}{index}aa)\n" for index in range(4))
PARTS = """\
GPU 0: NVIDIA A100 (UUID: GPU-aa)
  MIG 1g.5gb     Device  0: (UUID: MIG-b0)
  MIG 1g.5gb     Device  1: (UUID: MIG-b1)
"""


def slurm(rank, local, **more):
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
    } | more


def hydra(rank, local):
    return {"PMI_SIZE": "8", "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(local), "MPI_LOCALNRANKS": "4"}


def openmpi(rank, local):
    return {
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }


@pytest.mark.parametrize("launcher", [slurm, hydra, openmpi])
def test_ranks_of_a_host_take_its_gpus_in_turn(launcher):
    # The second host's ranks count from 0 again.
    assert [gpus.local_device(launcher(rank, rank % 4), FOUR) for rank in range(8)] == [0, 1, 2, 3] * 2


def test_more_ranks_than_gpus_share_them():
    two = "".join(FOUR.splitlines(keepends=True)[:2])
    assert [gpus.local_device(slurm(rank, rank), two) for rank in range(4)] == [0, 1, 0, 1]


def test_a_plain_process_takes_the_first():
    assert gpus.local_device({}, FOUR) == 0
    assert gpus.local_device({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, FOUR) == 0  # a batch script


def test_a_mask_for_each_rank_shows_device_0():
    """What Slurm does where tasks are bound: each has another mask, or sees only its own device 0."""
    for rank in range(4):
        assert gpus.local_device(slurm(rank, rank, CUDA_VISIBLE_DEVICES=str(rank)), FOUR) == 0
        alone = f"GPU 0: NVIDIA H200 (UUID: GPU-{rank}{rank}aa)\n"
        assert gpus.local_device(slurm(rank, rank, CUDA_VISIBLE_DEVICES="0"), alone) == 0


def test_a_mask_for_all_ranks_is_shared_out():
    masked = [gpus.local_device(slurm(rank, rank, CUDA_VISIBLE_DEVICES="3,1"), FOUR) for rank in range(4)]
    assert masked == [0, 1, 0, 1]
    shown = gpus.visible({"CUDA_VISIBLE_DEVICES": "3,1"}, FOUR)
    assert [gpu.index for gpu in shown] == ["3", "1"]


def test_no_gpu():
    with pytest.raises(LaunchError, match=r"^gpu: .* nvidia-smi lists none on .*; ask the job for one"):
        gpus.local_device({}, "No devices were found\n")


@pytest.mark.parametrize("mask", ["", "-1", "NoDevFiles"])
def test_a_mask_that_hides_everything(mask):
    with pytest.raises(LaunchError, match=f"CUDA_VISIBLE_DEVICES='{mask}' hides every GPU of .*; unset it"):
        gpus.local_device({"CUDA_VISIBLE_DEVICES": mask}, FOUR)


@pytest.mark.parametrize("mask", ["4", "0,7", "GPU-ff", "G"])
def test_a_mask_of_another_rank(mask):
    """It names what is not here: CUDA would leave it out, and the rank would have no GPU or another one."""
    with pytest.raises(LaunchError, match=f"CUDA_VISIBLE_DEVICES={mask} names '.*', which this process does not have"):
        gpus.local_device(slurm(1, 1, CUDA_VISIBLE_DEVICES=mask), FOUR)


def test_a_launcher_without_a_local_rank_is_refused():
    pmix = {"PMIX_SIZE": "4", "PMIX_RANK": "2"}
    with pytest.raises(LaunchError, match=r"speaks PMIX does not tell .* set CUDA_VISIBLE_DEVICES for each rank"):
        gpus.local_device(pmix, FOUR)
    assert gpus.local_device(pmix | {"CUDA_VISIBLE_DEVICES": "2"}, FOUR) == 0


def test_it_starts_no_mpi():
    code = (
        "import sys, mpicomp\n"
        "try:\n    mpicomp.local_device()\nexcept mpicomp.MpicompError:\n    pass\n"
        "assert not {'mpi4py.MPI', 'torch', 'cupy', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
