import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpicomp.bench.lab import launch
from mpicomp.bench.lab.settings import make_settings
from mpicomp.bench.lab.units import LabError

SETTINGS = make_settings(2, 2, "1gbit", "0us", ["program", "an argument"])


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_command_line_ends_with_the_command(mpi, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    line = launch.command_line(mpi, Path("/bin/mpiexec"), "/agent", SETTINGS)
    assert line[0] == "/bin/mpiexec"
    assert line[-2:] == ["program", "an argument"]
    assert "4" in line
    assert "/agent" in line


def test_niceness_keeps_the_command_as_it_is(monkeypatch):
    monkeypatch.setattr(os, "nice", lambda increment: 3)
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    line = launch.command_line("mpich", Path("/bin/mpiexec"), "/agent", SETTINGS)
    wrapped = [*line[line.index("/bin/sh") : -2], "printf", "%s|", "a  b", "c"]
    done = subprocess.run(wrapped, capture_output=True, text=True, check=True)
    assert done.stdout == "a  b|c|"


def test_environment_holds_mpi_to_eth0():
    caller = {"PATH": "/bin", "UCX_NET_DEVICES": "all", "UCX_TLS": "tcp", "OMPI_MCA_btl": "tcp,self"}
    mpich = launch.environment("mpich", 2, 1, caller)
    assert mpich["UCX_NET_DEVICES"] == "eth0"
    assert mpich["UCX_TLS"] == "tcp"
    assert mpich["PATH"] == f"{Path(sys.executable).parent}:/bin"
    openmpi = launch.environment("openmpi", 2, 2, caller)
    assert openmpi["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    assert openmpi["OMPI_MCA_btl"] == "tcp,self"


def test_missing_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LabError, match="needs the MPI launcher beside Python"):
        launch.find_launcher()
