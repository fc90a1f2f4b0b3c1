"""Twenty ranks that sleep or are stopped: random step, moment, rank, collective and number of ranks; each is named."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import run

LIMIT_S = 2.0  # MPICOMP_STALL
LATE = 0.1  # share of it within which the missing rank is named
pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import json, os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpicomp

kind, victim, step_of_stall, compressor, collective, moment, wanted_s = json.loads(sys.argv[1])
rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
reducer = mpicomp.Reducer(compressor, collective, policy={"warmup": 0})

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def stop():
    say("stalls", os.getpid(), time.monotonic())
    os.kill(os.getpid(), signal.SIGSTOP)

for step in range(60):
    gradient = np.random.default_rng([step, rank]).standard_t(3, (100, 80)).astype(np.float32)
    if rank == victim and step == step_of_stall:
        if kind == "stop":
            threading.Timer(moment, stop).start()
        else:
            say("stalls", os.getpid(), time.monotonic())
            time.sleep(wanted_s)
    mean = reducer.reduce({"w": gradient})["w"]
    time.sleep(0.002)
bits = MPI.COMM_WORLD.allgather(mean.tobytes())
say("ended", len(set(bits)))
reducer.close()
"""

EXCHANGES = [
    ("dense", "allreduce"), ("dense", "ring"), ("dense", "recursive-doubling"), ("topk", "allgather"),
    ("topk", "star-topk:ring"), ("topk", "gtopk"), ("topk", "oktopk"), ({"id": "powersgd", "rank": 1}, "low-rank:ring"),
    ({"id": "qsgd", "rounding": "nearest"}, "two-phase"), ("topk", "parameter-server"),
]  # fmt: skip


def stalls(number):
    """Return what is drawn from a seed: a number of ranks, and the words of the program."""
    rng = random.Random(number)
    ranks = rng.randint(2, 4)
    compressor, collective = EXCHANGES[number % len(EXCHANGES)]
    kind = ("sleep", "stop")[number // len(EXCHANGES) % 2]
    words = [kind, rng.randrange(ranks), rng.randrange(2, 30), compressor, collective, rng.uniform(0, 0.05)]
    return ranks, words


class Job:
    """A running job, whose lines are kept with the times at which they came."""

    def __init__(self, ranks, words, environ, folder):
        command, settings = run.launcher()
        self.process = subprocess.Popen(
            [*command, "-n", str(ranks), sys.executable, "-c", PROGRAM, json.dumps(words)],
            env={**environ, **settings, "MPICOMP_STALL": str(LIMIT_S)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def line(self, pattern, within, since=0.0):
        """Wait for a line that comes after a time, and return when it came and what was found in it."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            for came, line in list(self.lines):
                if came > since and (found := re.search(pattern, line)):
                    return came, found
            time.sleep(0.001)
        pytest.fail(f"no line with '{pattern}' within {within} s\n{self.text}")

    @property
    def text(self):
        return "".join(line for _, line in self.lines)

    def end(self, within):
        """Wait for the end, make one where there is none, and return the exit status."""
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            run.kill(self.process.pid, stacks_s=0)
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        return self.process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_who_stalls_is_named(clean_environ, tmp_path, number):
    ranks, words = stalls(number)
    job, pid = Job(ranks, [*words, LIMIT_S + 1], clean_environ, tmp_path), None
    try:
        _, stalled = job.line(r"stalls (\d+) (\S+)", 60)
        pid, began = int(stalled[1]), float(stalled[2])
        # Ranks may have waited before, for one that was compiling kernels.
        came, named = job.line(r"mpicomp: rank \d has waited .*", LIMIT_S + 5, since=began)
        late = came - began - LIMIT_S
        if words[0] == "stop":
            os.kill(pid, signal.SIGCONT)
        assert job.end(30) == 0, job.text
    finally:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        job.end(0)
    print(f"{words[0]} of rank {words[1]} of {ranks} in {words[4]}: named {late:+.3f} s after the limit")
    assert f": rank {words[1]} is not there" in named[0], job.text
    assert job.text.count("ended 1\n") == ranks, job.text
    assert late <= LATE * LIMIT_S
