"""The template as it is shipped, on four nodes; and what a user reads who starts it in a wrong way."""

import json
import os

import pytest
from slurm.jobs import submit

SINGLETONS = "srun started 4 processes, but each of them is rank 0 of 1"

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_template_trains_on_four_nodes(slurm, mpich, tmp_path):
    # One processor a rank: sixteen threads would wait for each other on a small machine.
    knobs = {"TASK": "digits", "RATIO": "0.05", "STEPS": "20"}
    job = submit(slurm, tmp_path, "train_cpu.sbatch", "--cpus-per-task=1", **knobs)
    assert job.states == ["COMPLETED"], job.printed
    assert "no problem found" in job.printed
    result = json.loads((tmp_path / f"train_cpu-{job.number}.json").read_text())
    assert {name: result[name] for name in ("task", "compressor", "ratio", "ranks", "hosts", "steps")} == {
        "task": "digits",
        "compressor": "topk",
        "ratio": 0.05,
        "ranks": 4,
        "hosts": 4,
        "steps": 20,
    }
    assert len((tmp_path / f"train_cpu-{job.number}.jsonl").read_text().splitlines()) == 20


def test_ranks_get_the_threads_of_their_task(slurm, stand_in, tmp_path):
    job = submit(slurm, tmp_path, "train_cpu.sbatch", VENV=stand_in, LAUNCH="none")
    assert job.states == ["COMPLETED"], job.printed
    assert job.printed.count("mpicomp train with 4 threads") == 4


def test_template_stops_with_the_doctors_message(slurm, mpich, tmp_path):
    job = submit(slurm, tmp_path, "train_cpu.sbatch", LAUNCH="none")
    assert (job.states, job.statuses) == (["FAILED"], [1])
    assert not list(tmp_path.glob("*.json"))
    assert SINGLETONS in job.printed
    assert "srun --mpi=pmi2 -n 4" in job.printed
    assert "train_cpu: mpicomp doctor failed, so nothing else was started; what it says is above" in job.printed


def test_template_reports_missing_mpicomp(slurm, tmp_path):
    # The environment of the tests may have mpicomp on the PATH.
    job = submit(slurm, tmp_path, "train_cpu.sbatch", VENV=tmp_path, PATH=os.defpath)
    assert (job.states, job.statuses) == (["FAILED"], [1])
    assert "train_cpu: mpicomp is not on the PATH of n1; set VENV or MODULES" in job.printed
