import json
import os
import subprocess
import sys

import pytest
from marks import slow
from tables import check_types, documented


@pytest.fixture
def alone(clean_environ):
    """Start ``mpicomp doctor`` as a process that no launcher started."""

    def start(*arguments, **environ):
        return subprocess.run(
            [sys.executable, "-m", "mpicomp", "doctor", *arguments],
            env={**clean_environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return start


@pytest.mark.parametrize("ranks", [slow(1), 3])
def test_healthy_job_has_no_problem(mpiexec, ranks):
    ended = mpiexec(ranks, "-m", "mpicomp", "doctor", "--json", timeout=60)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    report = json.loads(ended.stdout)  # one object: rank 0 alone prints
    assert report["schema"] == 1
    assert report["ranks"] == ranks
    assert [host["ranks"] for host in report["hosts"]] == [list(range(ranks))]
    assert report["launcher"]["size"] == ranks
    assert len(report["gpus"]) == ranks
    assert report["problems"] == []
    assert set(report["mpi"]) >= {"vendor", "library", "version", "standard", "thread_level"}
    assert os.path.exists(report["mpi"]["library"])
    assert "\n" not in report["mpi"]["version"]
    assert isinstance(report["cuda_aware"]["value"], bool)
    assert report["cuda_aware"]["reason"]
    assert report["packages"]["mpi4py"]
    cores = len(os.sched_getaffinity(0))
    assert any("share" in note["what"] for note in report["notes"]) == (ranks > cores)
    if ranks > 1:
        check_fields(report)


def check_fields(report):
    """Compare every field with docs/cluster.md."""
    parts = {
        "The report": report,
        "`mpi`": report["mpi"],
        "`hosts`": report["hosts"][0],
        "`binding`": report["binding"][0],
        "`cuda_aware`": report["cuda_aware"],
        "`transports`": report["transports"],
        "`link`": report["link"],
        "`clocks`": report["clocks"],
        "`fork`": report["fork"],
        "`launcher`": report["launcher"],
    }
    for heading, written in parts.items():
        fields = documented("cluster.md", heading)
        assert list(written) == list(fields), heading
        numbers = {name for name, kind in fields.items() if kind == "list of integers"}
        assert all(isinstance(number, int) for name in numbers for number in written[name])
        check_types(written, {name: kind for name, kind in fields.items() if name not in numbers})


def test_process_without_a_launcher_is_one_rank(alone):
    report = json.loads(alone("--json").stdout)
    assert report["launcher"] is None
    assert report["ranks"] == 1
    assert report["problems"] == []


def test_singletons_are_reported_once(alone):
    step = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    first, second = (alone("--json", SLURM_PROCID=rank, **step) for rank in ("0", "1"))
    # The first rank that fails may end the job, so only the one that prints fails.
    assert [first.returncode, second.returncode] == [1, 0]
    assert second.stdout == ""
    (problem,) = json.loads(first.stdout)["problems"]
    assert "rank 0 of 1" in problem["what"]
    flavour = "pmix" if "Open MPI" in json.loads(first.stdout)["mpi"]["vendor"] else "pmi2"
    assert problem["fix"].startswith(f"srun --mpi={flavour} -n 4 ")
    assert problem["fix"].endswith("doctor --json")


def test_foreign_launcher_is_a_problem_and_no_crash(alone):
    if "MPICH" not in alone().stdout:
        pytest.skip("MPICH only: Open MPI speaks PMIx")
    # What Open MPI's mpirun sets, as far as MPICH looks at it; the server itself is not there.
    mpirun = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_SERVER_URI41": "x;tcp4://127.0.0.1:1"}
    ended = alone("--json", OMPI_COMM_WORLD_SIZE="3", OMPI_COMM_WORLD_RANK="0", **mpirun)
    assert ended.returncode == 1, ended.stderr
    (problem,) = json.loads(ended.stdout)["problems"]
    assert problem["what"].startswith("MPICH cannot start under mpirun of Open MPI: ")
    assert "/mpiexec -n 3 " in problem["fix"]


def test_without_mpi_library_the_fields_are_the_same(alone):
    ended = alone("--json", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert (ended.returncode, ended.stderr) == (1, "")
    report = json.loads(ended.stdout)
    assert report["problems"][0]["what"].startswith("mpi4py finds no MPI library")
    assert "pip install 'mpicomp[mpich]'" in report["problems"][0]["fix"]
    assert list(report) == list(documented("cluster.md", "The report"))
    check_types(report, documented("cluster.md", "The report"))


def test_missing_mpi4py_is_a_problem(alone, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    ended = alone("--json", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    report = json.loads(ended.stdout)
    assert report["mpi"] is None
    assert report["problems"][0]["what"] == "mpi4py is not installed"
    assert ended.stderr == ""


@pytest.mark.slow
def test_link_is_none_without_probes(mpiexec):
    ended = mpiexec(2, "-m", "mpicomp", "doctor", "--json", timeout=60, env={"MPICOMP_PROBE": "0"})
    assert json.loads(ended.stdout)["link"] is None


def test_threads_beyond_the_cores_are_noted(mpiexec):
    cores = len(os.sched_getaffinity(0))
    many = str(cores + 1)
    report = json.loads(
        mpiexec(1, "-m", "mpicomp", "doctor", "--json", timeout=60, env={"OMP_NUM_THREADS": many}).stdout
    )
    assert report["binding"][0]["threads"] == cores + 1
    [note] = [note for note in report["notes"] if "threads" in note["what"]]
    assert f"1 rank computes with {many} threads on {cores} core" in note["what"]
    assert f"OMP_NUM_THREADS={many}" in note["what"]
    assert note["fix"] == f"export OMP_NUM_THREADS={cores}"
