"""Threads of a rank: at most its share of the host's cores, unless the user has set them."""

import math
import os

import pytest

torch = pytest.importorskip("torch")

from mpicomp.bench.trainer import threads_of_rank  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("affinity", "cores", "slurm", "threads"),
    [
        (64, 64, None, 64),  # alone on its host
        (64, 16, None, 16),  # four ranks, none of them bound
        (16, 16, None, 16),  # four ranks, each bound to its own
        (2, 0.5, None, 1),  # more ranks than cores
        (3, 1.5, None, 1),
        (64, 32, "4", 4),  # two tasks of four, and nothing binds them
        (8, 2, "8", 2),  # mpiexec started four ranks in one task of eight
        (4, 4, "8", 4),  # bound to fewer than Slurm says
        (64, math.inf, "4", 4),  # ranks inside one process
        (64, 16, "", 16),
        (64, 16, "many", 16),
        (64, 16, "0", 1),
    ],
)
def test_threads_are_the_ranks_share_of_cores(monkeypatch, affinity, cores, slurm, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    if slurm is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    assert threads_of_rank(cores) == threads


def test_threads_of_the_user_count(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)  # PyTorch reads the variable when it is loaded
    assert threads_of_rank(1) == 7
