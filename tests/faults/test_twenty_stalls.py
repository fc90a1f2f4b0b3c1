"""Twenty ranks that sleep or are stopped: random step, moment, rank, collective and number of ranks; each is named."""

import json
import random
import re

import pytest

LIMIT_S = 2.0  # MPICOMP_STALL
STALL_S = 1.1 * LIMIT_S  # after which the missing rank is back: it has to be named within a tenth of the limit
pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import json, os, signal, subprocess, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpicomp

kind, victim, step_of_stall, compressor, collective, moment, stall_s = json.loads(sys.argv[1])
rank = MPI.COMM_WORLD.rank
reducer = mpicomp.Reducer(compressor, collective, policy={"warmup": 0})

def stop():
    subprocess.Popen(["sh", "-c", f"sleep {stall_s}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

for step in range(60):
    gradient = np.random.default_rng([step, rank]).standard_t(3, (100, 80)).astype(np.float32)
    if rank == victim and step == step_of_stall:
        if kind == "stop":
            threading.Timer(moment, stop).start()
        else:
            time.sleep(stall_s)
    mean = reducer.reduce({"w": gradient})["w"]
    time.sleep(0.002)
bits = MPI.COMM_WORLD.allgather(mean.tobytes())
sys.stdout.write(f"ended {len(set(bits))}\\n")
reducer.close()
"""

EXCHANGES = [
    ("dense", "allreduce"), ("dense", "ring"), ("dense", "recursive-doubling"), ("topk", "allgather"),
    ("topk", "star-topk:ring"), ("topk", "oktopk"), ({"id": "powersgd", "rank": 1}, "low-rank:ring"),
    ({"id": "qsgd", "rounding": "nearest"}, "two-phase"), ("dense", "parameter-server"),
]  # fmt: skip


def stalls(number):
    """Return what is drawn from a seed: a number of ranks, and the words of the program."""
    rng = random.Random(number)
    ranks = rng.randint(2, 4)
    compressor, collective = EXCHANGES[number % len(EXCHANGES)]
    kind = ("sleep", "stop")[number // len(EXCHANGES) % 2]
    words = [kind, rng.randrange(ranks), rng.randrange(2, 30), compressor, collective, rng.uniform(0, 0.05)]
    return ranks, words


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_rank_that_stalls_is_named_in_time(mpiexec, number):
    ranks, words = stalls(number)
    job = mpiexec(ranks, "-c", PROGRAM, json.dumps([*words, STALL_S]), timeout=90, env={"MPICOMP_STALL": str(LIMIT_S)})
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("ended 1\n") == ranks, job.stdout
    # Ranks may have waited in earlier steps, for one that was compiling kernels.
    named = re.findall(r"has waited for \S+ s in the .*? of step (\d+).*: rank (\d) is not there", job.stderr)
    assert any(int(step) >= words[2] and int(rank) == words[1] for step, rank in named), job.stderr
