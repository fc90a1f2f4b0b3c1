"""Ranks that fail or leave while the others are in an exchange, as real jobs: they end, and say why.

The limit of each job is three times what docs/sharp-bits.md promises, and the start of Python on a busy machine.
"""

import re

import pytest
from marks import slow

START_S = 30

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpicomp

rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
last = ranks - 1


class Plain:
    def __init__(self, collective="allgather"):
        self.reducer = mpicomp.Reducer("topk", collective)

    def step(self):
        self.reducer.reduce({"layer.weight": np.full(5000, rank + 1.0, np.float32)})

    def close(self):
        self.reducer.close()


class Torch:
    def __init__(self, overlap):
        import torch
        import mpicomp.torch
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(50, 100), torch.nn.Linear(100, 10))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = mpicomp.torch.DistributedOptimizer(
            optimizer, self.model.named_parameters(), "topk", "allgather", overlap=overlap, bucket_bytes=10_000)
        self.inputs = torch.ones(4, 50)

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        self.optimizer.step()

    def close(self):
        self.optimizer.close()


def fail(*_):
    raise KeyError("what went wrong")


def trainer():
    return {"plain": Plain, "torch": lambda: Torch(False), "overlap": lambda: Torch(True)}[sys.argv[1]]()
"""


@pytest.fixture
def job(mpiexec, tmp_path):
    def start(ranks, body, kind="plain", within=10, first="", **env):
        program = tmp_path / "program.py"
        program.write_text(first + PROGRAM + body)
        return mpiexec(ranks, program, kind, timeout=3 * within + START_S, env=env)

    return start


FINALLY = """
training = trainer()
try:
    for step in range(5):
        if rank == last and step == 3:
            {fails}
        training.step()
finally:
    training.close()
print("the end", flush=True)
"""
IN_BACKWARD = "next(training.model.parameters()).register_hook(fail)"


@pytest.mark.parametrize(
    ("ranks", "kind", "fails", "said"),
    [
        (4, "plain", "fail()", "KeyError: 'what went wrong'"),
        slow(2, "torch", "fail()", "KeyError: 'what went wrong'"),
        slow(3, "overlap", IN_BACKWARD, "KeyError: 'what went wrong'"),
        slow(3, "plain", "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", "KeyboardInterrupt"),
        slow(3, "plain", "sys.exit(3)", "rank 2 of 3: left with status 3"),
    ],
)
def test_rank_that_fails_and_closes_ends_the_job(job, ranks, kind, fails, said):
    """By an exception, in backward while buckets are under way too, an interrupt or an exit with an error."""
    ended = job(ranks, FINALLY.format(fails=fails), kind)
    assert ended.returncode != 0
    assert ended.returncode == 3 or "sys.exit(3)" not in fails
    assert said in ended.stderr
    assert "the end" not in ended.stdout


LEAVES = """
def main():
    training = trainer()
    for step in range(3 if rank == last else 6):
        training.step()
    if rank == last:
        {leaves}
    training.close()
    time.sleep(0.5)

main()
"""


@pytest.mark.parametrize(
    ("ranks", "kind", "leaves"),
    [
        (3, "overlap", "return"),
        slow(4, "plain", "sys.exit(0)"),
        slow(2, "torch", "raise SystemExit(3)"),
        slow(2, "plain", "MPI.Finalize(); return"),
    ],
)
def test_rank_that_leaves_is_named_and_the_job_ends(job, ranks, kind, leaves):
    ended = job(ranks, LEAVES.format(leaves=leaves), kind)
    assert ended.returncode != 0
    said = r"rank \d has waited for \d\.\d s in the \w+ of step \d.*: rank {} has left the program; ending the job"
    assert re.search(said.format(ranks - 1), ended.stderr)
    assert "optimizer.join()" in ended.stderr
    assert "Stack of the main thread" in ended.stderr
    assert "training.step()" in ended.stderr


CLOSES = """
shared = None
if sys.argv[1] == "shared":
    from mpicomp.mpi.comm import MPITransport
    shared = MPITransport()
    training = Plain()
    training.reducer = mpicomp.Reducer("topk", "allgather", comm=shared)
else:
    training = trainer()
training.step()
another = mpicomp.Reducer("dense", comm=shared)
another.reduce({{'w': np.ones(3)}})
world = MPI.COMM_WORLD
other = world.Split(0, -rank)
if rank == last:
    {closes}
    {waits}
training.step()
"""


@pytest.mark.parametrize(
    ("kind", "closes", "waits"),
    [
        ("plain", "training.close()", "world.Barrier()"),
        slow("plain", "training.close()", "time.sleep(60)"),
        slow("torch", "training.close()", "another.reduce({'w': np.ones(3)})"),
        ("shared", "training.close()", "world.Barrier()"),
        # mpi4py's first sum of objects on a communicator waits with Python's lock, so that this rank answers nothing
        ("overlap", "training.close()", "world.allreduce(0.5)"),
        slow("plain", "del training", "world.reduce(0.5)"),
        slow("plain", "training.close()", "other.gather(0.5)"),
    ],
)
def test_rank_that_has_closed_is_named_and_the_job_ends(job, kind, closes, waits):
    ended = job(3, CLOSES.format(closes=closes, waits=waits), kind, MPICOMP_STALL="2")
    assert ended.returncode != 0
    said = r"rank 0 has waited for [01]\.\d s in the \w+ of step 1.*: rank 2 has closed its reducer"
    assert re.search(said, ended.stderr)
    assert "training.step()" in ended.stderr


INTERRUPTED = """
import subprocess

def interrupted(*_):
    time.sleep(6)  # as one that saves a checkpoint
    print("saved", flush=True)
    time.sleep(0.5)  # the launcher drops output that it has not passed on when a job is aborted
    MPI.COMM_WORLD.Abort(4)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
training = trainer()
training.step()
pids = MPI.COMM_WORLD.allgather(os.getpid())
if rank == last:
    subprocess.Popen(["sh", "-c", "sleep 1; kill -INT " + " ".join(map(str, pids))])
    {does}
training.step()
"""


@pytest.mark.parametrize(
    ("does", "status", "said"),
    [
        ("training.close(), MPI.COMM_WORLD.allreduce(0.5)", 130, "rank 1 has closed it; ending the job (Ctrl-C"),
        slow("MPI.COMM_WORLD.Barrier()", 130, "rank 1 is not there; ending the job (Ctrl-C"),
        ("signal.signal(signal.SIGINT, interrupted), time.sleep(30)", 4, ""),
    ],
)
def test_interrupt_ends_a_job_of_which_no_rank_can_act_on_it(job, does, status, said):
    ended = job(2, INTERRUPTED.format(does=does), within=5, MPICOMP_NAPS="0")
    assert (ended.returncode, "saved" in ended.stdout) == (status, status == 4)
    assert said in ended.stderr


CHECKPOINT = """
training = Plain()
training.step()
if rank != 0:
    mpicomp.save_checkpoint("checkpoints", {"step": 1})
"""
ON_SOME_RANKS = """
Plain().step()
if rank != 0:
    mpicomp.Reducer("topk")
else:
    time.sleep(4)
"""
IN_ANOTHER_ORDER = """
first, second = Plain(), Plain()
first.step(), second.step()
for training in (first, second) if rank == 0 else (second, first):
    training.step()
"""
IN_DIFFERENT_EXCHANGES = [
    r"rank 0 has waited .*: ranks? [12, ]+ waits? for something else",
    r"ending the job \(all ranks have to make the same calls in the same order\)",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "body", "env", "said"),
    [
        (3, LEAVES.format(leaves="return"), {"MPI4PY_RC_THREAD_LEVEL": "single"}, ["rank 2 has left the program"]),
        (3, CHECKPOINT, {"MPICOMP_STALL": "60"}, ["in the making of a transport", "rank 0 has left the program"]),
        (
            3,
            ON_SOME_RANKS,
            {"MPICOMP_STALL": "1"},
            [
                r"rank 1 has waited for \S+ s in the making of a transport.*: rank 0 is not there",
                "rank 0 has left the program; ending the job",
            ],
        ),
        (3, IN_ANOTHER_ORDER, {"MPICOMP_STALL": "1"}, IN_DIFFERENT_EXCHANGES),
    ],
    ids=["without threads", "before a checkpoint", "a reducer on some ranks", "2 reducers"],
)
def test_ranks_that_wait_in_vain_end_the_job(job, ranks, body, env, said):
    ended = job(ranks, body, within=5, **env)
    assert ended.returncode != 0
    for pattern in said:
        assert re.search(pattern, ended.stderr), ended.stderr


COMPUTES = """
from mpicomp.mpi.comm import MPITransport
shared = MPITransport()
for _ in range(2):  # numbers of the first one's users are those of another one's, which is open
    with mpicomp.Reducer("topk", "allgather", comm=shared) as first:
        first.reduce({"w": np.ones(9)})
    if rank == last:
        time.sleep(4)
    with mpicomp.Reducer("topk", "allgather", comm=shared) as second:
        second.reduce({"w": np.ones(9)})
    if rank == last:
        time.sleep(4)
shared.close()
"""
GOES_ON = """
training = Plain()
for _ in range(3):
    training.step()
if rank == 0:
    time.sleep(5)
"""
LATE = "if rank == 0:\n    time.sleep(3)\nPlain().step()"
IN_A_PART = """
part = MPI.COMM_WORLD.Split(rank > 1, rank)
reducer = mpicomp.Reducer("dense", "allreduce", comm=part)
reducer.reduce({"w": np.ones(10)})
if rank == 3:
    time.sleep(4)
reducer.reduce({"w": np.ones(10)})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "body", "stall", "said"),
    [
        (3, COMPUTES, 1, ""),
        (3, GOES_ON, 2, "^$"),
        (2, LATE, 1, "rank 1 has waited for 1 s for the other ranks to make a reducer"),
        (4, IN_A_PART, 1, r"rank 2 has waited for 1\.\d s in the allreduce of step 1, .*: rank 3 is not there"),
    ],
    ids=["computes", "goes on", "the first reducer", "a part of the ranks"],
)
def test_rank_that_takes_longer_is_waited_for(job, ranks, body, stall, said):
    ended = job(ranks, body + "\nprint('done', flush=True)", MPICOMP_STALL=str(stall))
    assert ended.returncode == 0
    assert ended.stdout.count("done") == ranks
    assert re.search(said, ended.stderr)


BROKEN = """
training = Plain("oktopk")
training.step()

if rank == last:
    from mpicomp.kernels import cpu
    def fails(*_, **__):
        raise MemoryError("no memory left")
    before, cpu.merge_add = cpu.merge_add, fails

try:
    training.step()
except MemoryError:
    cpu.merge_add = before
    {then}
"""
CONSTRUCTOR = """
class Mine(mpicomp.TopK):
    def get_config(self):
        raise ZeroDivisionError("in my compressor")

try:
    if rank == last:
        mpicomp.Reducer(Mine(0.1))
    else:
        Plain().step()
except {caught}:
    {then}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (BROKEN.format(then="training.step()"), "MemoryError: no memory left"),
        slow(BROKEN.format(then="time.sleep(60)"), "MemoryError: no memory left"),
        (CONSTRUCTOR.format(caught="()", then="pass"), "ZeroDivisionError: in my compressor"),
        slow(CONSTRUCTOR.format(caught="ZeroDivisionError", then="sys.exit(2)"), "in my compressor|left with status 2"),
    ],
    ids=["steps", "sleeps", "constructor", "constructor, status 2"],
)
def test_foreign_error_in_an_exchange_ends_the_job(job, body, said):
    """Also where it is caught: the next call of that rank would join the others in the middle of the step before."""
    ended = job(3, body)
    assert ended.returncode != 0
    assert re.search(said, ended.stderr)


@pytest.mark.parametrize(
    ("kind", "said"),
    [slow("plain", "MPI is finalized on this rank"), slow("overlap", "submit nothing after stop")],
)
def test_step_after_finalize_is_a_closed_error(job, kind, said):
    body = """
training = trainer()
training.step()
MPI.Finalize()
try:
    training.step()
except mpicomp.errors.ClosedError as error:
    print(error, flush=True)
training.close()
"""
    ended = job(2, body, kind)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count(said) == 2


@pytest.mark.slow
def test_thread_levels_that_differ_become_the_lowest(job):
    body = """
training = Torch(None)
for _ in range(3):
    training.step()
training.optimizer.reducer.transport.check_threads(alone=True)
print(training.optimizer.overlaps, flush=True)
training.close()
"""
    first = """
import mpi4py
from mpicomp.job import launcher
mpi4py.rc.thread_level = "serialized" if launcher.detect().rank == 1 else "multiple"
"""
    ended = job(3, body, first=first)
    assert ended.returncode == 0, ended.stderr
    assert re.findall("True|False", ended.stdout) == ["False"] * 3


@pytest.mark.slow
def test_hundreds_of_dropped_reducers_leave_nothing(job):
    body = """
for number in range(800):
    training = Plain()
    training.again = training
training = Plain()
training.step()
print("done", flush=True)
"""
    ended = job(2, body, within=30)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    assert ended.stderr.count("were dropped without close()") == 1
