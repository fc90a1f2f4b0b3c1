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


def trainer():
    return {"plain": Plain, "torch": lambda: Torch(False), "overlap": lambda: Torch(True)}[sys.argv[1]]()
"""


@pytest.fixture
def job(mpiexec, tmp_path):
    def start(ranks, body, *arguments, within=10, first="", **env):
        program = tmp_path / "program.py"
        program.write_text(first + PROGRAM + body)
        return mpiexec(ranks, program, *(arguments or ["plain"]), timeout=3 * within + START_S, env=env)

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


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(4, "plain"), slow(3, "overlap"), slow(2, "plain"), slow(3, "torch"), slow(2, "overlap"), slow(4, "overlap")],
)
def test_an_exception_behind_which_everything_is_closed(job, ranks, kind):
    ended = job(ranks, FINALLY.format(fails="raise KeyError('what went wrong')"), kind)
    assert ended.returncode != 0
    assert "KeyError: 'what went wrong'" in ended.stderr
    assert "the end" not in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_interrupt_behind_which_everything_is_closed(job, ranks):
    ended = job(ranks, FINALLY.format(fails="os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"))
    assert ended.returncode != 0
    assert "KeyboardInterrupt" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, slow(2), slow(4)])
def test_an_exit_with_an_error_behind_which_everything_is_closed(job, ranks):
    ended = job(ranks, FINALLY.format(fails="sys.exit(3)"))
    assert ended.returncode == 3
    assert f"rank {ranks - 1} of {ranks}: left with status 3" in ended.stderr


@pytest.mark.slow
def test_an_exception_in_backward_while_buckets_are_under_way(job):
    body = """
training = Torch(True)
training.step()

def fails(*_):
    raise KeyError("what went wrong")

if rank == last:
    next(training.model.parameters()).register_hook(fails)
try:
    training.step()
finally:
    training.close()
"""
    ended = job(3, body)
    assert ended.returncode != 0
    assert "KeyError: 'what went wrong'" in ended.stderr


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
        slow(2, "plain", "return"),
        slow(4, "plain", "sys.exit(0)"),
        slow(3, "plain", "raise SystemExit(3)"),
        slow(2, "plain", "MPI.Finalize(); return"),
        slow(2, "torch", "raise SystemExit(3)"),
        (3, "overlap", "return"),
        slow(4, "overlap", "sys.exit(0)"),
    ],
)
def test_a_rank_that_leaves_is_named_and_the_job_ends(job, ranks, kind, leaves):
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
    from mpicomp.transport.mpi import MPITransport
    shared = MPITransport()
    training = Plain()
    training.reducer = mpicomp.Reducer("topk", "allgather", comm=shared)
else:
    training = trainer()
training.step()
another = mpicomp.Reducer("dense", comm=shared)
another.reduce({{'w': np.ones(3)}})
if rank == last:
    training.close()
    {waits}
training.step()
"""


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("plain", "MPI.COMM_WORLD.Barrier()"),
        slow("plain", "time.sleep(60)"),
        slow("torch", "another.reduce({'w': np.ones(3)})"),
        ("overlap", "MPI.COMM_WORLD.Barrier()"),
        ("shared", "MPI.COMM_WORLD.Barrier()"),
    ],
)
def test_a_rank_that_has_closed_is_named_and_the_job_ends(job, kind, waits):
    ended = job(3, CLOSES.format(waits=waits), kind, MPICOMP_STALL="2")
    assert ended.returncode != 0
    said = r"rank 0 has waited for [01]\.\d s in the \w+ of step 1.*: rank 2 has closed what this exchange"
    assert re.search(said, ended.stderr)
    assert "training.step()" in ended.stderr


@pytest.mark.slow
def test_who_computes_with_a_reducer_open_is_waited_for(job):
    body = """
from mpicomp.transport.mpi import MPITransport
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
print("done", flush=True)
"""
    ended = job(3, body, MPICOMP_STALL="1")
    assert ended.returncode == 0
    assert ended.stdout.count("done") == 3


@pytest.mark.slow
def test_it_is_found_out_without_threads_too(job):
    ended = job(3, LEAVES.format(leaves="return"), MPI4PY_RC_THREAD_LEVEL="single")
    assert ended.returncode != 0
    assert "rank 2 has left the program" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_before_a_checkpoint_is_written(job, tmp_path):
    body = f"""
training = Plain()
training.step()
if rank != 0:
    mpicomp.save_checkpoint({str(tmp_path / "ck")!r}, {{"step": 1}})
"""
    ended = job(3, body)
    assert ended.returncode != 0
    assert "in the making of a transport" in ended.stderr
    assert "rank 0 has left the program" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_who_goes_on_alone_with_something_else_is_left_alone(job, ranks):
    body = """
training = Plain()
for _ in range(3):
    training.step()
if rank == 0:
    time.sleep(5)
    print("evaluated", flush=True)
"""
    ended = job(ranks, body, MPICOMP_STALL="2")
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "evaluated", "")


BROKEN = """
training = Plain({collective!r})
training.step()

if rank == last:
    from mpicomp.kernels import cpu
    def fails(*_, **__):
        raise MemoryError("no memory left")
    before, cpu.{kernel} = cpu.{kernel}, fails

try:
    training.step()
except MemoryError:
    cpu.{kernel} = before
    {then}
"""


@pytest.mark.parametrize(
    "then",
    [
        "training.step()",
        slow("sys.exit(0)"),
        slow("time.sleep(60)"),
        slow("mpicomp.Reducer('dense').reduce({'w': np.ones(4)})"),
    ],
)
def test_an_error_that_is_none_of_ours_and_is_caught(job, then):
    """Its next call would join the others in the middle of the step before."""
    ended = job(3, BROKEN.format(collective="gtopk", kernel="norm_change", then=then))
    assert ended.returncode != 0
    assert "MemoryError: no memory left" in ended.stderr


CONSTRUCTORS = """
def wrong():
    {wrong}

try:
    if rank == last:
        wrong()
    else:
        Plain().step()
except {caught}:
    {then}
"""


@pytest.mark.parametrize(
    ("caught", "then"),
    [("()", "pass"), slow("ZeroDivisionError", "sys.exit(0)"), slow("ZeroDivisionError", "sys.exit(2)")],
)
def test_constructor_fails_on_one_rank_by_an_error_of_the_user(job, caught, then):
    wrong = """
    class Mine(mpicomp.TopK):
        def get_config(self):
            raise ZeroDivisionError("in my compressor")
    mpicomp.Reducer(Mine(0.1))
"""
    ended = job(3, CONSTRUCTORS.format(wrong=wrong.strip(), caught=caught, then=then))
    assert ended.returncode != 0
    assert "ZeroDivisionError: in my compressor" in ended.stderr or "status 2" in ended.stderr


@pytest.mark.slow
def test_a_reducer_that_is_made_on_some_ranks_only(job):
    body = """
Plain().step()
if rank != 0:
    mpicomp.Reducer("topk")
else:
    time.sleep(4)
"""
    ended = job(3, body, MPICOMP_STALL="1", within=5)
    assert ended.returncode != 0
    assert re.search(r"rank 1 has waited for \S+ s in the making of a transport.*: rank 0 is not there", ended.stderr)
    assert "rank 0 has left the program; ending the job" in ended.stderr


@pytest.mark.slow
def test_the_first_reducer_is_waited_for_with_a_word(job):
    body = "if rank == 0:\n    time.sleep(3)\nPlain().step()\nprint('done', flush=True)\n"
    ended = job(2, body, MPICOMP_STALL="1", within=5)
    assert ended.returncode == 0
    assert "rank 1 has waited for 1 s for the other ranks to make a reducer" in ended.stderr
    assert ended.stdout.count("done") == 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [slow(2), 3])
def test_ranks_that_wait_for_each_other_in_different_reducers(job, ranks):
    body = """
first, second = Plain(), Plain()
first.step(), second.step()
for training in (first, second) if rank == 0 else (second, first):
    training.step()
"""
    ended = job(ranks, body, MPICOMP_STALL="1", within=5)
    assert ended.returncode != 0
    assert re.search(r"rank 0 has waited .*: ranks? [12, ]+ waits? for something else", ended.stderr)
    assert "ending the job (all ranks have to make the same calls in the same order)" in ended.stderr


@pytest.mark.parametrize(
    ("kind", "said"),
    [slow("plain", "MPI has come to its end on this rank"), slow("overlap", "submit nothing after stop")],
)
def test_finalizing_mpi_with_an_open_reducer(job, kind, said):
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
def test_thread_levels_that_differ(job):
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
from mpicomp.system import launcher
mpi4py.rc.thread_level = "serialized" if launcher.detect().rank == 1 else "multiple"
"""
    ended = job(3, body, first=first)
    assert ended.returncode == 0, ended.stderr
    assert re.findall("True|False", ended.stdout) == ["False"] * 3


@pytest.mark.slow
def test_ranks_of_a_part_have_their_numbers_of_the_job(job):
    body = """
part = MPI.COMM_WORLD.Split(rank > 1, rank)
reducer = mpicomp.Reducer("dense", "allreduce", comm=part)
reducer.reduce({"w": np.ones(10)})
if rank == 3:
    time.sleep(4)
reducer.reduce({"w": np.ones(10)})
"""
    ended = job(4, body, MPICOMP_STALL="1", within=5)
    assert ended.returncode == 0
    assert re.search(r"rank 2 has waited for 1\.\d s in the allreduce of step 1, .*: rank 3 is not there", ended.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("drop", ["del training", slow("training.close()"), slow("training.again = training")])
def test_reducers_are_made_and_dropped_without_end(job, drop):
    body = f"""
for number in range(1500 if {drop!r} == "training.close()" else 800):
    training = Plain()
    {drop}
training = Plain()
training.step()
print("done", flush=True)
"""
    ended = job(2, body, within=30)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    said = ended.stderr.count("were dropped without close()")
    assert said == (0 if drop == "training.close()" else 1)
