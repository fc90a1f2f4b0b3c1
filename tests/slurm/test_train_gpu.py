"""The template as it is shipped, on nodes whose GPUs only Slurm believes in: ranks find none and use the CPU."""

import os
import re

import pytest
from marks import slow
from slurm.jobs import BIN, SLURM, submit

pytestmark = pytest.mark.timeout(300)

EXAMPLE = SLURM.parent / "docs" / "examples" / "hsdp.py"
NODES = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
SHARDED = """\
import runpy

import torch
from mpi4py import MPI

model, loss = runpy.run_path({example!r})["main"](shards=2)  # all nodes of the cluster are one host
held = torch.cat([parameter.to_local().detach().flatten() for parameter in model.parameters()]).tolist()
shards = MPI.COMM_WORLD.allgather(held)
if MPI.COMM_WORLD.rank == 0:
    print("replicas alike:", shards[:2] == shards[2:], "shards alike:", shards[0] == shards[1])
"""
SHOW = """\
import os

local = os.environ.get("MPI_LOCALRANKID", os.environ["SLURM_LOCALID"])
print(f"{os.environ['SLURMD_NODENAME']} local {local} sees {os.environ.get('CUDA_VISIBLE_DEVICES')}")
"""


@pytest.mark.slow
def test_template_trains_and_reports_no_gpu(slurm, mpich, tmp_path):
    knobs = {"SCRIPT": SLURM / "train.py", "ARGS": "--steps 20"}
    job = submit(slurm, tmp_path, "train_gpu.sbatch", *NODES, **knobs)
    assert job.states == ["COMPLETED"], job.printed
    assert "4 ranks on cpu, cpu, cpu, cpu\nno GPU: gpu: " in job.printed
    [accuracy] = re.findall(r"20 steps on 4 ranks: held-out accuracy (\S+)", job.printed)
    assert float(accuracy) > 0.3  # a guess is right one time in ten


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["mpiexec", "pmi2"])
def test_model_is_sharded_inside_nodes(slurm, mpich, tmp_path, launch):
    (tmp_path / "sharded.py").write_text(SHARDED.format(example=str(EXAMPLE)))
    job = submit(slurm, tmp_path, "train_gpu.sbatch", *NODES, SCRIPT="sharded.py", LAUNCH=launch)
    assert job.states == ["COMPLETED"], job.printed
    assert "replicas alike: True shards alike: False" in job.printed


@pytest.mark.slow
def test_template_without_a_script_needs_a_gpu(slurm, mpich, tmp_path):
    job = submit(slurm, tmp_path, "train_gpu.sbatch", *NODES, ARGS="--task digits --steps 5")
    assert (job.states, job.statuses) == (["FAILED"], [2])
    assert job.printed.count("train: --device gpu: gpu: a process that works on a GPU needs one") == 1


@pytest.mark.parametrize(
    ("launch", "bind", "seen"),
    [
        slow("none", "single:1", {"0": "0", "1": "1"}),
        ("none", "map_gpu:1,0", {"0": "1", "1": "0"}),
        ("mpiexec", "single:1", {"0": "0,1", "1": "0,1"}),  # there mpicomp.local_device takes one for each rank
    ],
)
def test_ranks_of_a_node_see_their_gpus(slurm, mpich, stand_in, tmp_path, launch, bind, seen):
    (tmp_path / "show.py").write_text(SHOW)
    knobs = {"SCRIPT": "show.py", "LAUNCH": launch, "GPU_BIND": bind, "VENV": stand_in}
    job = submit(slurm, tmp_path, "train_gpu.sbatch", *NODES, **knobs, PATH=f"{BIN}:{os.environ['PATH']}")
    assert job.states == ["COMPLETED"], job.printed
    found = re.findall(r"(n\d) local (\d) sees (\d(?:,\d)*)", job.printed)
    nodes = {node for node, _, _ in found}
    assert len(nodes) == 2
    assert sorted(found) == sorted((node, local, gpus) for node in nodes for local, gpus in seen.items())
