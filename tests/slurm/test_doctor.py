"""The doctor's problems under a wrong srun, and that the command of the fix works."""

import json
import shlex
import sys

import pytest

DOCTOR = (sys.executable, "-m", "mpicomp", "doctor", "--json")

pytestmark = pytest.mark.timeout(110)


def report_of(done):
    assert done.stdout, done.stderr
    return json.loads(done.stdout)  # one object: of all processes one prints


def test_singletons(slurm, mpich, monkeypatch):
    monkeypatch.setitem(slurm.environment, "MPICOMP_PROBE", "0")
    done = slurm.run("srun", "-N4", "-n4", "--mpi=none", *DOCTOR)
    assert done.returncode == 1
    report = report_of(done)
    assert report["ranks"] == 1
    [problem] = report["problems"]
    assert problem["what"] == (
        "srun started 4 processes, but each of them is rank 0 of 1: MPICH did not understand this launcher, so 4 "
        "separate jobs are running (no PMI is offered, as by srun --mpi=none)"
    )
    assert problem["fix"].startswith("srun --mpi=pmi2 -n 4 ")
    again = slurm.run(*shlex.split(problem["fix"]))
    assert again.returncode == 0, again.stderr + slurm.logs()
    assert report_of(again)["ranks"] == 4


def test_job_of_several_nodes_is_reported(slurm, mpich):
    done = slurm.run("srun", "-N2", "-n2", "--mpi=pmi2", *DOCTOR, OMP_NUM_THREADS="1")
    report = report_of(done)
    assert done.returncode == 0, report
    assert report["problems"] == []
    assert [host["ranks"] for host in report["hosts"]] == [[0], [1]]
    assert report["link"]["between"] == "hosts"
    assert report["link"]["bytes_per_s"] > 0
    assert report["clocks"]["error_s"] > 0
    assert not any("wall clocks" in note["what"] for note in report["notes"])  # the nodes are one machine
    assert report["launcher"] == {"name": "slurm", "size": 2}
