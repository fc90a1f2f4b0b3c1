"""The template as it is shipped, on four nodes; and what a user is told who starts it in a wrong way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).resolve().parents[2] / "slurm" / "train_cpu.sbatch"
BIN = Path(sys.executable).parent
SINGLETONS = "srun started 4 processes, but each of them is rank 0 of 1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(110),
    pytest.mark.skipif(not (BIN / "mpicomp").exists(), reason="needs mpicomp installed beside this Python"),
]


@pytest.fixture(scope="module")
def mpich():
    version = subprocess.run([BIN / "mpiexec", "--version"], capture_output=True, text=True, check=False)
    if "HYDRA" not in version.stdout:
        pytest.skip("needs MPICH beside this Python")


def submit(slurm, folder, *options, **knobs):
    """Submit the template from a folder and wait; give the status, what it printed, and its result or None."""
    folder.mkdir()
    export = ",".join(["ALL", *(f"{name}={value}" for name, value in ({"VENV": BIN.parent} | knobs).items())])
    try:
        done = slurm.run("sbatch", "--wait", f"--export={export}", *options, TEMPLATE, cwd=folder, timeout=100)
    finally:
        slurm.run("scancel", "--user=root")
    printed = "".join(file.read_text() for file in folder.glob("mpicomp-*.out"))
    results = list(folder.glob("mpicomp-*.json"))
    return done.returncode, printed + done.stderr, json.loads(results[0].read_text()) if results else None


def test_the_template_trains_on_four_nodes(slurm, mpich, tmp_path):
    # One processor a rank: sixteen threads would wait for each other on a small machine.
    knobs = {"TASK": "digits", "RATIO": "0.05", "STEPS": "20"}
    status, printed, result = submit(slurm, tmp_path / "job", "--cpus-per-task=1", **knobs)
    assert status == 0, printed
    assert "no problem found" in printed
    assert {name: result[name] for name in ("task", "compressor", "ratio", "ranks", "hosts", "steps")} == {
        "task": "digits",
        "compressor": "topk",
        "ratio": 0.05,
        "ranks": 4,
        "hosts": 4,
        "steps": 20,
    }
    [metrics] = (tmp_path / "job").glob("mpicomp-*.jsonl")
    assert len(metrics.read_text().splitlines()) == 20


def test_srun_with_pmi2_starts_one_job(slurm, mpich):
    done = slurm.run("srun", "-N4", "-n4", "--mpi=pmi2", BIN / "mpicomp", "doctor", "--json")
    assert done.returncode == 0, done.stderr + slurm.logs()
    assert json.loads(done.stdout)["ranks"] == 4


def test_the_template_gives_a_rank_the_threads_of_its_task(slurm, tmp_path):
    fake = tmp_path / "environment"
    (fake / "bin").mkdir(parents=True)
    program = fake / "bin" / "mpicomp"
    program.write_text('#!/bin/sh\necho "$1 with $OMP_NUM_THREADS threads"\n')
    program.chmod(0o755)
    status, printed, _ = submit(slurm, tmp_path / "job", VENV=fake, LAUNCH="none")
    assert status == 0, printed
    assert printed.count("train with 4 threads") == 4


def test_the_template_stops_with_the_doctors_message(slurm, mpich, tmp_path):
    status, printed, result = submit(slurm, tmp_path / "job", LAUNCH="none")
    assert status == 1
    assert result is None
    assert SINGLETONS in printed
    assert "fix: srun --mpi=pmi2 -n 4" in printed
    assert "train_cpu: mpicomp doctor failed, so nothing was trained; what it says is above" in printed


def test_the_template_says_when_there_is_no_mpicomp(slurm, tmp_path):
    # Whoever runs the tests may have an environment with it on the PATH.
    status, printed, _ = submit(slurm, tmp_path / "job", VENV=tmp_path, PATH=os.defpath)
    assert status == 1
    assert "train_cpu: mpicomp is not on the PATH of" in printed


def test_a_wrong_launcher_is_named(slurm, mpich):
    done = slurm.run("srun", "-N4", "-n4", "--mpi=none", BIN / "mpicomp", "train", "--task=digits", "--steps=1")
    assert done.returncode != 0
    assert SINGLETONS in done.stderr
    assert "start it with: srun --mpi=pmi2 -n 4" in done.stderr
