"""A rank is killed, and the others go on without it: with Open MPI, whose ranks can outlive each other."""

import json
import pickle
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
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.mpi import LocalWorld

pytestmark = pytest.mark.timeout(300)
JOB_S = 120  # a job takes 9 s on two idle cores, and 24 where two others run

PROGRAM = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
import ctypes, hashlib, json, os, pickle, sys, threading, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpicomp

world = MPI.COMM_WORLD
rank, ones = world.rank, {"w": np.ones(100, np.float32)}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def draw(step, name, shape):
    return np.random.default_rng([step, name]).standard_t(3, shape).astype(np.float32)

def on_rounds(reducer, act):
    perform = reducer.transport.perform
    def acting(task):
        act()
        return perform(task)
    reducer.transport.perform = acting

def make_reducer(comm=None):
    return mpicomp.Reducer("dense", comm=comm, on_failure="shrink")

def report(reducer, lost, values, *more):
    bits = hashlib.blake2b(b"".join(value.tobytes() for value in values)).hexdigest()
    print("row", json.dumps([sorted(lost), bits, reducer.transport.group.size, *more]), flush=True)
"""

REDUCER = """
folder, names, compressor, collective, first, last, when, victim = json.loads(sys.argv[1])
folder, name = Path(folder), names[rank]  # what this rank is called in the first job
calls = []
survive = {"on_failure": lambda lost, left: calls.append([lost, left])} if victim >= 0 else {}
reducer = mpicomp.Reducer(compressor, collective, policy={"warmup": 0}, **survive)
if first:
    reducer.load_state_dict(pickle.loads((folder / f"before-{name}").read_bytes()))
rounds = 0

def act():
    global rounds
    rounds += 1
    if step == last // 2 and name == victim and rounds == when:
        die()

on_rounds(reducer, act)
for step in range(first, last):
    rounds = 0
    if step == last // 2 and victim >= 0:
        (folder / f"before-{name}").write_bytes(pickle.dumps(reducer.state_dict()))
        if when == 0 and name == victim:
            die()
    mean = reducer.reduce({"w": draw(step, name, (50, 40))})["w"].copy()
    lost = list(reducer.last_step.lost_ranks)
    assert lost == ([victim] if victim >= 0 and step == last // 2 else []), (step, lost)
    assert reducer.last_step.step == step
outcome = {"mean": mean, "residual": reducer.residual("w"), "calls": calls, "left": reducer.transport.group.size}
(folder / f"{'restarted' if first else 'survived'}-{name}").write_bytes(pickle.dumps(outcome))
reducer.close()
"""


@pytest.fixture
def command(clean_environ):
    """Return the line that starts ranks which may outlive each other, and its environment."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] != "Open MPI":
        pytest.skip("the MPI of this Python is no Open MPI, the only one whose ranks outlive each other")

    def line(ranks, source, *words):
        launcher = [str(Path(sys.executable).with_name("mpiexec")), "--with-ft", "ulfm", "--oversubscribe"]
        python = [sys.executable, "-c", PROGRAM + source, *map(str, words)]
        return [*launcher, "--allow-run-as-root", "-n", str(ranks), *python], clean_environ | {"OMP_NUM_THREADS": "1"}

    return line


@pytest.fixture
def job(command):
    """Run such a job and return what it printed."""

    def start(ranks, source, *words, status=0):
        line, environ = command(ranks, source, *words)
        with subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
            try:
                printed, _ = job.communicate(timeout=JOB_S)
            except subprocess.TimeoutExpired:
                run.kill(job.pid)  # ranks print their stacks first
                printed, _ = job.communicate()
                pytest.fail(f"no end after {JOB_S} s:\n{printed}", pytrace=False)
        assert status in (job.returncode, None), printed
        return printed

    return start


@pytest.mark.parametrize(
    ("compressor", "collective", "when", "victim"),
    [
        ("topk", "allgather", 0, 2),
        ({"id": "powersgd", "rank": 1}, "low-rank:ring", 2, 3),
        slow({"id": "qsgd", "rounding": "nearest"}, "two-phase", 1, 0),
    ],
    ids=str,
)
def test_survivors_equal_a_restart_from_their_states(job, tmp_path, compressor, collective, when, victim):
    """Killed before a step or in the middle of its rounds: to the bit what three ranks do that load what they held."""
    job(4, REDUCER, json.dumps([str(tmp_path), [0, 1, 2, 3], compressor, collective, 0, 12, when, victim]))
    left = [name for name in range(4) if name != victim]
    job(3, REDUCER, json.dumps([str(tmp_path), left, compressor, collective, 6, 12, 0, -1]))
    for name in left:
        first, second = (pickle.loads((tmp_path / f"{what}-{name}").read_bytes()) for what in ("survived", "restarted"))
        np.testing.assert_array_equal(first["mean"], second["mean"])
        np.testing.assert_array_equal(first["residual"], second["residual"])
        assert first["calls"] == [[[victim], 3]]
        assert first["left"] == second["left"] == 3


TORCH = """
import torch
import mpicomp.torch

torch.set_num_threads(1)
kind, compressor, step_of_death, delay, victims = json.loads(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(5) for layer in (torch.nn.Linear(200, 200), torch.nn.Tanh())])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
settings = {"compressor": compressor, "warmup": 0, "on_failure": "shrink"}
if kind == "muon":
    optimizer = mpicomp.torch.LocalMuon(model, compressor=compressor, sync_every=2, on_failure="shrink")
elif kind == "updates":
    optimizer = mpicomp.torch.UpdateOptimizer(optimizer, model.named_parameters(), **settings)
else:
    settings |= {"overlap": kind == "overlap", "bucket_bytes": 200_000}
    optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters(), **settings)
lost = []
for step in range(60):
    if step == step_of_death and rank in victims:
        threading.Timer(delay, die).start()
    inputs = torch.randn(8, 200, generator=torch.Generator().manual_seed(10 * step + rank))
    optimizer.zero_grad()
    (model(inputs) - inputs).square().mean().backward()
    before = optimizer.reducer.last_step
    optimizer.step()
    record = optimizer.reducer.last_step
    if record is not before and record.lost_ranks:
        lost += record.lost_ranks
    if step >= step_of_death and not lost:
        time.sleep(0.005)  # so that death comes before the end
report(optimizer.reducer, lost, [value.detach().numpy() for value in model.parameters()])
optimizer.close()
"""


def rows(printed):
    return [json.loads(line.removeprefix("row ")) for line in printed.splitlines() if line.startswith("row ")]


def check_survivors(printed, victims, ranks=4):
    reports = rows(printed)
    assert len(reports) == ranks - len(victims), printed
    assert {tuple(row[0]) for row in reports} == {tuple(victims)}
    assert len({row[1] for row in reports}) == 1  # the same bits
    assert {row[2] for row in reports} == {ranks - len(victims)}
    return reports


@pytest.mark.parametrize(
    ("kind", "compressor"),
    [
        ("updates", "topk"),
        slow("inline", "dense"),
        slow("overlap", None),
        slow("muon", "onebit"),
    ],
    ids=str,
)
def test_optimizers_survive_a_death(job, kind, compressor):
    check_survivors(job(4, TORCH, json.dumps([kind, compressor, 20, 0.013, [1]])), [1])


ENDED = (
    "MPI has not reported it for",
    "another rank has died while those that are left became a group without the first one; the job ends",
)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("pairs", "least"), [(1, 0), slow(10, 7)])
def test_two_deaths_at_once_are_survived_or_end_the_job(job, pairs, least):
    survived = 0
    for _ in range(pairs):
        printed = job(4, TORCH, json.dumps(["inline", "topk", 20, 0.01, [0, 2]]), status=None)
        if rows(printed):
            check_survivors(printed, [0, 2])
            survived += 1
        else:
            assert any(text in printed for text in ENDED), printed
    assert survived >= least


KINDS = """
settings, step_of_death, victim, groups = json.loads(sys.argv[1])
policy = settings.pop("policy", {}) | {"warmup": 0}
comm = world.Split(rank % groups, rank)
reducer = mpicomp.Reducer(on_failure="shrink", bucket_bytes=40_000, policy=policy, comm=comm, **settings)
on_rounds(reducer, lambda: die() if step == step_of_death and rank == victim else None)
lost = []
for step in range(2 * step_of_death):
    means = reducer.reduce({"a": draw(step, rank, (80, 100)), "b": draw(step + 99, rank, 6000)}, lr=0.1)
    lost += reducer.last_step.lost_ranks
report(reducer, lost, means.values(), rank % groups)
reducer.close()
"""
_LGC = {"id": "lgc", "dense_steps": 3, "training_steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "step", "victim"),
    [
        ({}, 12, 1),
        ({"policy": {"id": "lgreco"}}, 12, 0),
        ({"compressor": _LGC | {"training_steps": 12}}, 8, 0),  # while it learns
        ({"compressor": _LGC}, 22, 0),
        ({"compressor": "topk", "collective": "hierarchical"}, 12, 2),
    ],
    ids=str,
)
def test_policies_and_learned_codes_survive_a_death(job, settings, step, victim):
    check_survivors(job(4, KINDS, json.dumps([settings, step, victim, 1])), [victim])


def test_death_in_a_group_leaves_other_groups_alone(job):
    reports = rows(job(6, KINDS, json.dumps([{"compressor": "topk"}, 9, 2, 2])))
    assert sorted((row[0], row[2], row[3]) for row in reports) == [([], 3, 1)] * 3 + [([2], 2, 0)] * 2
    assert len({row[1] for row in reports}) == 2  # the same bits in each group


SIX_STEPS = """
reducer = make_reducer()
for step in range(6):
    if step == 3 and rank == 1:
        {death}
    mean = reducer.reduce(ones)["w"]
print("row", mean[0], flush=True)
reducer.close()
"""
DEATH_AFTER_THE_LAST_STEP = """
reducer = make_reducer()
reducer.reduce(ones)
if rank == 0:
    time.sleep(1)  # the others have left, and wait for this one
    die()
reducer.close()
"""
# Ranks without a reducer have no part in what the others agree on at their end, and come to MPI's own.
RANKS_WITHOUT_A_REDUCER = """
part = world.Split(rank % 2, rank)
if rank % 2 == 0:
    reducer = make_reducer(part)
    reducer.reduce(ones)
    reducer.close()
"""


@pytest.mark.parametrize(
    ("ranks", "source", "status"),
    [
        (3, SIX_STEPS.format(death="die()") + "sys.exit(3 if rank == 0 else 0)", 3),
        (3, DEATH_AFTER_THE_LAST_STEP, 0),
        (4, RANKS_WITHOUT_A_REDUCER, 0),
    ],
    ids=["a rank that is left has a status", "the others have left", "some ranks have no reducer"],
)
def test_job_that_may_lose_ranks_ends(job, ranks, source, status):
    job(ranks, source, status=status)


def test_rank_that_crashes_dies_at_once(job):
    """Open MPI's handler prints a backtrace in the crashed process, which deadlocks if that held malloc's lock."""
    printed = job(3, SIX_STEPS.format(death="ctypes.string_at(0)"))
    assert printed.count("row 1.0") == 2
    assert "Fatal Python error: Segmentation fault" in printed
    assert "*** Process received signal ***" not in printed


# Rank 0 completes the exchange in which rank 1 dies, and rank 2 does not: what each of them counts by then differs.
# A schedule makes ranks compare settings in a message of each step, which then is under way.
DIFFERENT_PLACES = """
import torch, mpicomp.torch
from mpicomp.mpi import channel

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(10, 10)
if sys.argv[1] == "updates":
    optimizer = torch.optim.Adam(model.parameters())
    optimizer = mpicomp.torch.UpdateOptimizer(optimizer, model.named_parameters(), 1, "dense", on_failure="shrink")
else:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    optimizer = mpicomp.torch.DistributedOptimizer(
        optimizer, model.named_parameters(), compressor="topk", warmup=0, overlap=False, on_failure="shrink"
    )
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
finish = channel.StartedRound.finish

def finish_late(started, *naps):
    time.sleep(1)  # its messages are on their way
    channel.StartedRound.finish = finish
    return finish(started, *naps)

lost = []
for step in range(20):
    if step == 5 and rank == 1:
        threading.Timer(0.3, die).start()
    if step == 5 and rank == 2:
        channel.StartedRound.finish = finish_late
    optimizer.zero_grad()
    (model(torch.full((2, 10), rank + 1.0)) - 1).square().mean().backward()
    optimizer.step()
    schedule.step()
    lost += optimizer.reducer.last_step.lost_ranks
report(optimizer.reducer, lost, [value.detach().numpy() for value in model.parameters()])
optimizer.close()
"""


@pytest.mark.parametrize("kind", ["updates", "gradients"])
def test_ranks_that_leave_a_step_at_different_places_go_on(job, kind):
    check_survivors(job(3, DIFFERENT_PLACES, kind), [1], 3)


UNREPORTED = """
reducer = make_reducer()
reducer.reduce(ones)
if rank == 0:
    os.kill(os.getppid(), signal.SIGSTOP)  # the launcher, which reports deaths
    die()
reducer.reduce(ones)
"""


@pytest.mark.slow
def test_death_that_mpi_does_not_report_ends_the_job(command, tmp_path):
    line, environ = command(3, UNREPORTED)
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        job = subprocess.Popen(line, env=environ, stdout=file, stderr=file)
        ranks = []
        try:
            deadline = time.monotonic() + JOB_S
            while time.monotonic() < deadline and not (len(ranks) == 3 and gone(ranks)):
                ranks = max(ranks, run.descendants(job.pid), key=len)
                time.sleep(0.2)
            ended = gone(ranks)
        finally:
            job.send_signal(signal.SIGCONT)
            run.kill(job.pid, 0)
            job.wait()
    assert ended, printed.read_text()


def gone(processes):
    """Return whether all processes have ended; those that nobody has waited for count as ended."""

    def state(process):
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "X"

    return {state(process) for process in processes} <= {"X", "Z"}


def test_mpi_that_cannot_lose_ranks_is_refused(mpiexec):
    """On all ranks, with the line to use; also by an Open MPI that was started without it."""
    source = "import mpicomp; mpicomp.Reducer('dense', on_failure='shrink')"
    done = mpiexec(2, "-c", source)
    assert done.returncode != 0
    assert "on_failure='shrink' needs an MPI that outlives its ranks, got " in done.stderr
    assert "`mpiexec --with-ft ulfm -n N python ...`" in done.stderr


def test_on_failure_without_meaning_is_refused():
    with pytest.raises(UnknownNameError, match="on_failure: unknown name 'shrnk'; did you mean 'shrink'"):
        mpicomp.Reducer("dense", on_failure="shrnk", comm=LocalWorld(1).transports[0])
    with pytest.raises(ConfigurationError, match="needs ranks that are processes"):
        mpicomp.Reducer("dense", on_failure="shrink", comm=LocalWorld(1).transports[0])
