"""What this process and its host answer: GPUs, MPI library, threads, names, start method, a measured link."""

import threading

import pytest

from mpicomp.job import doctor
from mpicomp.job.cuda_aware import files
from mpicomp.job.doctor import probes
from mpicomp.job.doctor.probes import (
    measure,
    missing_gpu_library,
    resolves,
    thread_count,
    visible_gpus,
)

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-aa11)
  MIG 1g.18gb     Device  0: (UUID: MIG-cc33)
GPU 1: NVIDIA A100 (UUID: GPU-bb22)
"""


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (None, ["0: NVIDIA H200", "1: NVIDIA A100"]),
        ("1", ["1: NVIDIA A100"]),
        ("1,0", ["1: NVIDIA A100", "0: NVIDIA H200"]),
        ("GPU-bb", ["1: NVIDIA A100"]),
        ("MIG-cc33", ["MIG-cc33: MIG 1g.18gb"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_gpus_are_those_of_the_mask(mask, found):
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    visible, error = visible_gpus(environ, LISTING)
    assert (list(map(str, visible)), error) == (found, None)


def test_gpus_of_a_machine_without_any_are_no_error():
    assert visible_gpus({}, "") == ([], None)


CRAY = "MPI VERSION    : CRAY MPICH version 8.1.30.21 (ANL base 3.4a2)"
GTL = "/opt/cray/pe/mpich/8.1.30/gtl/lib/libmpi_gtl_cuda.so.0"
GPUS_ON = {"MPICH_GPU_SUPPORT_ENABLED": "1"}


def test_cray_mpich_without_its_gpu_library_is_a_problem():
    problem = missing_gpu_library(CRAY, ["/opt/cray/lib/libmpi_cray.so.12"], GPUS_ON)
    assert problem.what.startswith("MPICH_GPU_SUPPORT_ENABLED=1, but Cray MPICH's library for GPUs")
    assert "export MPICH_GPU_SUPPORT_ENABLED=0" in problem.fix


@pytest.mark.parametrize(
    ("version", "loaded", "environ"),
    [(CRAY, [GTL], GPUS_ON), (CRAY, [], {"MPICH_GPU_SUPPORT_ENABLED": "0"}), ("MPICH Version: 5.0.2", [], GPUS_ON)],
)
def test_gpu_library_of_other_jobs_is_not_missed(version, loaded, environ):
    assert missing_gpu_library(version, loaded, environ) is None


def test_library_is_the_one_that_is_mapped():
    maps = [
        "7f00-7f01 r-xp 00000000 08:01 41 /env/mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so",
        "7f00-7f01 r-xp 00000000 08:01 42 /opt/mpi/lib/libmpi_cxx.so.40",
        "7f00-7f01 rw-p 00000000 00:00 0",
        "7f00-7f01 r-xp 00000000 08:01 43 /opt/my mpi/lib/libmpich.so.12.1.0",
    ]
    assert doctor.library(maps) == "/opt/my mpi/lib/libmpich.so.12.1.0"
    assert doctor.library(maps[:3]) is None
    assert doctor.library(["1-2 r-xp 0 0:0 4 /opt/cray/lib/libmpi_gnu_123.so.12"]) is not None
    assert files([maps[3], "7f00-7f01 rw-p 0 0:0 0", maps[3]]) == ["/opt/my mpi/lib/libmpich.so.12.1.0"]


@pytest.mark.parametrize(
    ("setting", "threads"), [("4", 4), ("4,2", 4), (" 3 ", 3), ("", 16), ("0", 16), ("many", 16), (None, 16), ("²", 16)]
)
def test_threads_are_those_of_the_setting(setting, threads):
    found, reason = thread_count({} if setting is None else {"OMP_NUM_THREADS": setting}, 16)
    assert found == threads
    assert (reason == "OMP_NUM_THREADS is not set") == (threads == 16)


def test_resolves_names_with_an_address():
    assert resolves("localhost")
    assert not resolves("no-such-node.invalid")  # a name that is promised to have no address


def test_resolves_does_not_wait_for_a_dead_resolver(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(probes, "_RESOLVE_S", 0.05)
    monkeypatch.setattr(probes.socket, "getaddrinfo", lambda *_: answer.wait(100) and ["too late"])
    assert not resolves("slow")
    answer.set()


@pytest.mark.mpi(min_size=2)
def test_all_ranks_measure_the_same_link(comm):
    link, clocks = measure(comm)
    assert comm.allgather((link, clocks)) == [(link, clocks)] * comm.size
    assert link.latency_s > 0
    assert link.bytes_per_s > 0
    assert clocks.error_s >= 0
