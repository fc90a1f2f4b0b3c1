"""A rank that is slow, stopped for a while, or out of memory: who it is is said, and what can go on does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import run
from marks import slow

import mpicomp
from mpicomp.reducer import pace

pytestmark = pytest.mark.timeout(120)


@pytest.mark.mpi(min_size=2, max_size=3)
def test_the_record_says_which_rank_is_slow(comm):
    """And what it costs, from the 17th step on."""
    reducer = mpicomp.Reducer("topk", "allgather", warmup=0, comm=comm)
    late = comm.size - 1
    for step in range(2 * pace.EVERY):
        time.sleep(0.03 if comm.rank == late else 0.0)
        reducer.reduce({"w": np.full(1000, comm.rank + 1.0, np.float32)})
        record = reducer.last_step
        if step < pace.EVERY:
            assert (record.slowest_rank, record.slowest_costs_s) == (None, None)
    assert record.slowest_rank == late
    assert record.slowest_costs_s > 0.015
    assert len(set(comm.allgather(record.slowest_costs_s))) == 1
    assert record.to_json()["slowest_rank"] == late
    reducer.close()


TRAIN = """
import sys, time
from mpi4py import MPI
from mpicomp.bench.tasks.digits import Digits
from mpicomp.cli import main

def slow(self, *words, batch=Digits.batch):
    time.sleep(0.05 if MPI.COMM_WORLD.rank == 1 else 0.0)
    return batch(self, *words)

Digits.batch = slow
raise SystemExit(main(["train", "--task", "digits", "--compressor", "topk", "--steps", "20", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("more", [[], slow(["--exchange", "updates", "--every", "2"])], ids=str)
def test_the_verdict_of_a_run_says_which_rank_is_slow(mpiexec, tmp_path, more):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    file = tmp_path / "o.json"
    done = mpiexec(2, "-c", TRAIN, "--no-verdict", "--json", file, *more, timeout=100)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(file.read_text())
    assert outcome["slowest_rank"] == 1
    assert 0.025 < outcome["slowest_costs_s"] < outcome["median_step_s"] + 0.05
    assert re.search(r"; rank 1 is slow: a step takes it 0\.\d{3} s more work than the middle rank", done.stdout)
