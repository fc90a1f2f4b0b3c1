"""Whether MPI may be given GPU memory: only a certain yes is one, and every answer says how it is known."""

import re
import shutil
import subprocess
import sys

import pytest
from device.kinds import has_gpu

from mpicomp.job import cuda_aware as awareness
from mpicomp.job.cuda_aware import Awareness, cuda_aware, probe

YES = Awareness(True, "a child process that gave it GPU memory got it back")
NO = Awareness(False, "a child process that gave it GPU memory was ended by SIGSEGV")


@pytest.fixture
def library(tmp_path):
    """Build a library that answers as a vendor's does: ``library("int name(void) { .. }")``, its path."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build a library with")

    def build(source):
        (tmp_path / "bin").mkdir()
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib.c").write_text(source)
        path = tmp_path / "lib" / "libmpi.so"
        subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "lib.c", "-o", path], check=True, timeout=60)
        return str(path)

    return build


QUERY = "int MPIX_Query_cuda_support(void) {{ return {}; }}"
KINDS = "int MPIX_GPU_query_support(int kind, int *answer) {{ *answer = kind == 0 ? {} : 7; return {}; }}"


ASKED = "^the loaded {} library was asked$"
CRAY = "CRAY MPICH version 8.1.30"
ANSWERS = [
    *(("MPICH", "", source.format(answer, 0), {}, bool(answer), ASKED.format("MPICH"))
      for source in (QUERY, KINDS) for answer in (0, 1)),
    ("MPICH", "", KINDS.format(1, 5), {}, False, "overrules this$"),
    # The setting counts more than the library.
    ("Open MPI", "", QUERY.format(1), {"MPICOMP_CUDA_AWARE": "0"}, False, "^set by MPICOMP_CUDA_AWARE=0$"),
    ("Open MPI", "", QUERY.format(0), {"MPICOMP_CUDA_AWARE": "1"}, True, "^set by MPICOMP_CUDA_AWARE=1$"),
    ("MPICH", "", QUERY.format(1), {"MPICOMP_CUDA_AWARE": "maybe"}, False,
     "^MPICOMP_CUDA_AWARE must be 0 or 1, got 'maybe', which counts as 0$"),
    # These were built for CUDA and answer yes; GPU memory would crash them under these settings.
    *(("MPICH", CRAY, QUERY.format(1), setting, False, says) for setting, says in (
        ({}, "MPICH_GPU_SUPPORT_ENABLED=1 only, and it is not set"),
        ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, "ENABLED=1 only, and it is '0'"),
    )),
    *((vendor, "", QUERY.format(1), setting, False, says) for vendor, setting, says in (
        ("MVAPICH2", {}, "MV2_USE_CUDA=1 only, and it is not set"),
        ("MVAPICH2", {"MVP_USE_CUDA": "0"}, "MVP_USE_CUDA=1 only, and it is '0'"),
        ("Intel MPI", {}, "I_MPI_OFFLOAD=1"),
        ("Intel MPI", {"I_MPI_OFFLOAD": "0"}, "I_MPI_OFFLOAD=1 only, and it is '0'"),
        ("MPICH", {"MPIR_CVAR_ENABLE_GPU": "0"}, "MPIR_CVAR_ENABLE_GPU=0 turns it off"),
        ("Open MPI", {"OMPI_MCA_opal_cuda_support": "false"}, "OMPI_MCA_opal_cuda_support=false turns it off"),
        ("Open MPI", {"UCX_TLS": "rc,sm,self"}, "UCX_TLS=rc,sm,self leaves out cuda"),
        ("MPICH", {"UCX_TLS": "^cuda"}, r"UCX_TLS=\^cuda leaves out cuda"),
        ("MPICH", {"UCX_TLS": "tcp,cuda_ipc"}, "leaves out cuda"),
    )),
    *(("Open MPI", "", QUERY.format(1), {"UCX_TLS": transports}, True, "")
      for transports in ("all", "rc,cuda", "cuda_copy,tcp,cuda_ipc", "^tcp", "^sm,cuda_ipc")),
    ("MVAPICH2", "", QUERY.format(1), {"MV2_USE_CUDA": "1"}, True, ""),
]  # fmt: skip


@pytest.mark.parametrize(("vendor", "version", "source", "setting", "value", "says"), ANSWERS)
def test_answer_follows_the_setting_and_the_library(library, vendor, version, source, setting, value, says):
    found, reason = cuda_aware(vendor, library(source), setting, version)
    assert found is value
    assert re.search(says, reason), reason


@pytest.mark.parametrize(("vendor", "path"), [(None, None), ("MPICH", None), (None, "/nowhere"), ("Some", "/nowhere")])
def test_what_is_not_known_is_no(vendor, path):
    value, reason = cuda_aware(vendor, path, {}, loaded=[])
    assert value is False
    assert reason.endswith("MPICOMP_CUDA_AWARE=1 overrules this")


def test_cray_needs_its_second_library(library):
    path, on = library("int other;"), {"MPICH_GPU_SUPPORT_ENABLED": "1"}
    maps = ["7f00-7f01 r-xp 00000000 08:01 41 /opt/cray/pe/lib64/libmpi_gtl_cuda.so.0"]
    value, reason = cuda_aware("Cray MPICH", path, on, loaded=maps)
    assert value is True
    assert "libmpi_gtl_cuda" in reason
    assert cuda_aware("Cray MPICH", path, on, loaded=[])[0] is False


@pytest.mark.parametrize("answer", ["true", "false"])
def test_an_older_open_mpi_is_asked_by_its_tool(library, tmp_path, answer):
    path = library("int other;")
    tool = tmp_path / "bin" / "ompi_info"
    line = f"mca:opal:base:param:opal_built_with_cuda_support:value:{answer}"
    tool.write_text(f'#!/bin/sh\necho "{line}"\n')
    tool.chmod(0o755)
    assert cuda_aware("Open MPI", path, {}) == (answer == "true", "ompi_info was asked")
    assert cuda_aware("MPICH", path, {})[0] is False


def test_a_probe_overrules_the_library_but_is_not_enough(library):
    """It has sent to itself: the way to other ranks may know no GPUs."""
    path = library(QUERY.format(1))
    assert cuda_aware("MPICH", path, {}, probed=NO) == NO
    assert cuda_aware("MPICH", path, {}, probed=YES) == (True, f"the loaded MPICH library was asked, and {YES.reason}")
    value, reason = cuda_aware("MPICH", "/nowhere", {}, probed=YES)
    assert value is False
    assert "which proves nothing about other ranks" in reason


CHILDREN = [
    ("pass", YES),
    ("import sys; sys.exit(3)", None),
    ("import sys; sys.exit(1)", (False, "a child process that gave it GPU memory ended with status 1")),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", NO),
    # A library may wait that reads what it cannot reach.
    ("import time; time.sleep(100)", (False, "a child process that gave it GPU memory had not ended after 1 s")),
]


@pytest.mark.parametrize(("code", "expected"), CHILDREN)
def test_what_becomes_of_the_child(code, expected):
    limit = {"timeout_s": 1} if "sleep" in code else {}
    assert probe([sys.executable, "-c", code], **limit) == expected


def test_the_child_is_no_part_of_the_job():
    """A process that a launcher's variables make a rank waits for the others, or ends them."""
    code = "import os, sys; sys.exit(any(n.startswith(('PMI', 'SLURM_', 'OMPI_COMM_')) for n in os.environ))"
    job = {"PMI_RANK": "1", "PMIX_RANK": "1", "SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "1", "PATH": "/bin"}
    assert probe([sys.executable, "-c", code], job) == YES


def test_the_real_child():
    """What the library says is borne out: a yes by a child that survives."""
    assert isinstance(probe(), Awareness) == has_gpu()


def test_it_starts_no_mpi():
    code = "import sys, mpicomp.job.cuda_aware; assert not {'mpi4py', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert awareness.PROBE == "mpicomp.gpu.routes"
