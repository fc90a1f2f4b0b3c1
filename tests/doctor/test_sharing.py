"""What the doctor notes of ranks that take cores and GPUs from each other."""

import pytest
from doctor.ranks import rank

from mpicomp.doctor.sharing import cpu_notes, gpu_notes, openmp_notes


def test_ranks_with_a_core_each_are_fine():
    assert cpu_notes([rank(0, cpus=[0]), rank(1, cpus=[1])], None) == []
    assert cpu_notes([rank(0), rank(1), rank(2, leader=2, host="b")], None) == []


def test_more_ranks_than_cores():
    [note] = cpu_notes([rank(0), rank(1), rank(2)], None)
    assert note.what.startswith("3 ranks share 2 cores on a: ")
    # All of them on the same core, while the host has others.
    [note] = cpu_notes([rank(0, cpus=[7]), rank(1, cpus=[7])], "slurm")
    assert note.what.startswith("2 ranks share 1 cores on a: ")


def test_more_threads_than_cores():
    many = {"threads": 8, "threads_from": "OMP_NUM_THREADS is not set"}
    ranks = [rank(number, cpus=range(8), **many) for number in range(2)]
    [note] = cpu_notes(ranks, None)
    assert note.what.startswith("2 ranks compute with 16 threads on 8 cores of a (OMP_NUM_THREADS is not set): ")
    assert note.fix == "export OMP_NUM_THREADS=4"
    assert cpu_notes(ranks[:1], None) == []


@pytest.mark.parametrize(
    ("launcher", "fix"),
    [
        ("slurm", "srun --cpus-per-task=2 --cpu-bind=cores"),
        ("openmpi", "mpirun --map-by slot:PE=2 --bind-to core"),
        ("hydra", "mpiexec -bind-to core:2"),
        (None, "let the launcher bind each rank to 2 cores of its own"),
    ],
)
def test_bindings_that_overlap(launcher, fix):
    [note] = cpu_notes([rank(0, cpus=[0, 1, 2]), rank(1, cpus=[2, 3])], launcher)
    assert note.what == "ranks 0 and 1 on a are bound to cpus 0-2 and 2-3, which overlap"
    assert note.fix == fix
    # Cpus of different hosts have the same numbers.
    assert cpu_notes([rank(0, cpus=[0, 1]), rank(1, cpus=[1, 2], leader=1, host="b")], launcher) == []
    # Ranks that may run anywhere are not bound.
    assert cpu_notes([rank(0, cpus=[0, 1, 2]), rank(1, cpus=[0, 1, 2])], launcher) == []


def test_one_note_a_host_however_many_ranks_overlap():
    ranks = [rank(number, cpus=range(number, number + 9)) for number in range(9)]
    assert len(cpu_notes(ranks, "slurm")) == 1


def test_slurm_gives_a_rank_fewer_cpus_than_it_says():
    [note] = cpu_notes([rank(0, cpus=[5], cpus_per_task=4)], "slurm")
    assert note.what == "SLURM_CPUS_PER_TASK=4, but rank 0 on a may run on 1 (cpus 5)"
    assert note.fix == "srun --cpus-per-task=4"
    [note] = cpu_notes([rank(0, cpus=[5], cpus_per_task=4)], "hydra")
    assert note.fix == "export SLURM_CPU_BIND=none"
    assert cpu_notes([rank(0, cpus=range(4), threads=4, cpus_per_task=4)], "slurm") == []


def test_a_rank_with_more_threads_than_slurm_gives_it_is_noted_once():
    many = {"threads": 16, "threads_from": "OMP_NUM_THREADS is not set", "cpus_per_task": 4}
    [note] = cpu_notes([rank(0, cpus=range(8), **many)], "slurm")
    assert note.what == "SLURM_CPUS_PER_TASK=4, but rank 0 on a computes with 16 threads (OMP_NUM_THREADS is not set)"
    assert note.fix == "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"


def test_ranks_with_a_gpu_each_are_fine():
    assert gpu_notes([rank(0, gpu=0), rank(1, gpu=1)], None) == []
    assert gpu_notes([rank(0), rank(1)], None) == []
    # The same number on two hosts is two GPUs.
    assert gpu_notes([rank(0, gpu=0), rank(1, gpu=0, leader=1, host="b")], None) == []


def test_more_ranks_than_gpus():
    [note] = gpu_notes([rank(0, gpu=0), rank(1, gpu=1), rank(2, gpu=0)], None)
    assert note.what == "3 ranks share 2 GPUs on a"
    assert note.fix == "start at most 2 ranks on this host, or give the job more GPUs"


@pytest.mark.parametrize(
    ("launcher", "fix"), [("slurm", "srun --gpus-per-task=1"), ("hydra", "unset CUDA_VISIBLE_DEVICES")]
)
def test_the_mask_of_one_rank_on_all_ranks(launcher, fix):
    [note] = gpu_notes([rank(number, gpu=1, gpu_mask="1") for number in range(3)], launcher)
    assert note.what == "3 ranks share 1 GPUs on a; ranks 0-2 all have CUDA_VISIBLE_DEVICES=1"
    assert note.fix == fix


def test_ranks_whose_masks_number_one_gpu_alike_may_have_different_ones():
    # Where Slurm hides the other GPUs, each rank sees its own as number 0.
    ranks = [rank(0, gpu=0, gpu_mask="0"), rank(1, leader=0, host="a", gpu_mask="0")]
    other = type(ranks[0].device)("0", "H200", "GPU-other")
    ranks[1] = type(ranks[1])(**{**vars(ranks[1]), "device": other})
    assert gpu_notes(ranks, "slurm") == []


def test_openmp_that_binds_ranks_which_share_cores():
    bound = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    ranks = [rank(number, cpus=range(4)) for number in range(2)]
    [note] = openmp_notes(ranks, "hydra", bound)
    assert note.what.startswith("OMP_PROC_BIND=true OMP_PLACES=cores has OpenMP bind the main thread of each rank")
    assert note.fix.endswith("or mpiexec -bind-to core:2")
    assert openmp_notes(ranks, "hydra", {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}) == []
    assert openmp_notes([rank(0, cpus=[0, 1]), rank(1, cpus=[2, 3])], "hydra", bound) == []
