"""A Slurm cluster for the tests of the batch templates; a skip with its reason where there can be none."""

import subprocess

import pytest
from slurm.cluster import cluster, reason_without_slurm
from slurm.jobs import BIN


@pytest.fixture(scope="session")
def slurm(clean_environ):
    reason = reason_without_slurm()
    if reason is not None:
        pytest.skip(reason)
    with cluster(clean_environ) as running:
        yield running


@pytest.fixture(scope="session")
def mpich():
    """Skip where the templates cannot start ranks of what is installed next to this Python."""
    if not (BIN / "mpicomp").exists() or not (BIN / "mpiexec").exists():
        pytest.skip("needs mpicomp and mpiexec installed next to this Python")
    version = subprocess.run([BIN / "mpiexec", "--version"], capture_output=True, text=True, check=False)
    if "HYDRA" not in version.stdout:
        pytest.skip("needs MPICH next to this Python")


@pytest.fixture
def stand_in(tmp_path):
    """Return an environment whose mpicomp only prints its arguments."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "mpicomp"
    program.write_text('#!/bin/sh\necho "mpicomp $1 with $OMP_NUM_THREADS threads"\n')
    program.chmod(0o755)
    return folder
