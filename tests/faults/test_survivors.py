"""A rank is killed, and the others go on without it: with Open MPI, whose ranks can outlive each other."""

import json
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import run
from marks import slow

pytestmark = pytest.mark.timeout(300)
JOB_S = 120  # a job takes 9 s on two idle cores, and 24 where two others run

STACKS = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1, all_threads=True)\n"

REDUCER = """
import json, os, pickle, signal, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpicomp

folder, names, compressor, collective, first, last, when, victim = json.loads(sys.argv[1])
folder, rank = Path(folder), MPI.COMM_WORLD.rank
name = names[rank]  # what this rank is called in the first job
calls = []
survive = {"on_failure": lambda lost, left: calls.append([lost, left])} if victim >= 0 else {}
reducer = mpicomp.Reducer(compressor, collective, policy={"warmup": 0}, **survive)
if first:
    reducer.load_state_dict(pickle.loads((folder / f"before-{name}").read_bytes()))
rounds = 0

def perform(task, plain=type(reducer.transport).perform):
    global rounds
    rounds += 1
    if step == last // 2 and name == victim and rounds == when:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(reducer.transport, task)

reducer.transport.perform = perform
for step in range(first, last):
    rounds = 0
    if step == last // 2 and victim >= 0:
        (folder / f"before-{name}").write_bytes(pickle.dumps(reducer.state_dict()))
        if when == 0 and name == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    gradient = np.random.default_rng([step, name]).standard_t(3, (50, 40)).astype(np.float32)
    mean = reducer.reduce({"w": gradient})["w"].copy()
    lost = reducer.last_step.lost_ranks
    assert lost == ([victim] if victim >= 0 and step == last // 2 else []), (step, lost)
    assert reducer.last_step.step == step
left = reducer.transport.group.size
outcome = {"mean": mean, "residual": reducer.residual("w"), "calls": calls, "left": left}
(folder / f"{'restarted' if first else 'survived'}-{name}").write_bytes(pickle.dumps(outcome))
reducer.close()
"""


@pytest.fixture
def openmpi():
    from mpi4py import MPI

    if MPI.get_vendor()[0] != "Open MPI":
        pytest.skip("the MPI of this Python is no Open MPI, the only one whose ranks outlive each other")


@pytest.fixture
def job(openmpi, clean_environ):
    """Start ranks that may outlive each other; return what they printed."""

    def start(ranks, source, *words, status=0):
        launcher = [str(Path(sys.executable).with_name("mpiexec")), "--with-ft", "ulfm", "--oversubscribe"]
        python = [sys.executable, "-c", STACKS + source, *map(str, words)]
        command = [*launcher, "--allow-run-as-root", "-n", str(ranks), *python]
        environ = clean_environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
            try:
                printed, _ = job.communicate(timeout=JOB_S)
            except subprocess.TimeoutExpired:
                run.kill(job.pid)  # ranks print their stacks first
                printed, _ = job.communicate()
                pytest.fail(f"no end after {JOB_S} s:\n{printed}", pytrace=False)
        assert status in (job.returncode, None), printed
        return printed

    return start


def outcome(folder, what, name):
    return pickle.loads((folder / f"{what}-{name}").read_bytes())


@pytest.mark.parametrize(
    ("compressor", "collective", "when", "victim"),
    [
        ("topk", "allgather", 0, 2),
        slow("topk", "star-topk:ring", 1, 0),
        ({"id": "powersgd", "rank": 1}, "low-rank:ring", 2, 3),
        slow("dense", "ring", 1, 1),
        slow({"id": "qsgd", "rounding": "nearest"}, "two-phase", 1, 0),
        slow({"id": "dcttopk"}, "transformed:allgather", 1, 2),
    ],
    ids=str,
)
def test_those_that_are_left_go_on_as_if_they_had_been_restarted(job, tmp_path, compressor, collective, when, victim):
    """Killed before a step or in the middle of its rounds: to the bit what three ranks do that load what they held."""
    job(4, REDUCER, json.dumps([str(tmp_path), [0, 1, 2, 3], compressor, collective, 0, 12, when, victim]))
    left = [name for name in range(4) if name != victim]
    job(3, REDUCER, json.dumps([str(tmp_path), left, compressor, collective, 6, 12, 0, -1]))
    survived, restarted = ([outcome(tmp_path, what, name) for name in left] for what in ("survived", "restarted"))
    for first, second in zip(survived, restarted, strict=True):
        np.testing.assert_array_equal(first["mean"], second["mean"])
        np.testing.assert_array_equal(first["residual"], second["residual"])
        assert first["calls"] == [[[victim], 3]]
        assert first["left"] == second["left"] == 3


TORCH = """
import copy, hashlib, json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import torch
from mpi4py import MPI
import mpicomp.torch

torch.set_num_threads(1)
kind, compressor, step_of_death, delay, victims, steps = json.loads(sys.argv[1])
folder, names = (Path(sys.argv[2]), json.loads(sys.argv[3])) if len(sys.argv) > 2 else (None, [0, 1, 2, 3])
rank = names[MPI.COMM_WORLD.rank]  # what this rank is called in the first job
first = 0
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(5) for layer in (torch.nn.Linear(200, 200), torch.nn.Tanh())])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
settings = {"compressor": compressor, "warmup": 0, "on_failure": "shrink"}
if folder:
    settings["collective"] = "allgather"  # "auto" follows measured seconds, and sums have another order then
if kind in ("updates", "moments"):
    settings |= {"second_moments": {"sync_every": 1}} if kind == "moments" else {}
    optimizer = mpicomp.torch.UpdateOptimizer(optimizer, model.named_parameters(), **settings)
else:
    settings |= {"overlap": kind == "overlap", "bucket_bytes": 200_000}
    optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters(), **settings)
lost, seconds = [], 0.0
if len(names) < 4:  # to go on from what those that are left held
    held = torch.load(folder / f"{rank}", weights_only=False)
    first = held["step"]
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
for step in range(first, steps):
    if folder and step >= step_of_death and not lost and len(names) == 4:
        held = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        held = copy.deepcopy(held)
    if step == step_of_death and rank in victims:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    inputs = torch.randn(8, 200, generator=torch.Generator().manual_seed(10 * step + rank))
    optimizer.zero_grad()
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    begin = time.monotonic()
    optimizer.step()
    if optimizer.reducer.last_step.lost_ranks:
        lost += optimizer.reducer.last_step.lost_ranks
        seconds = max(seconds, time.monotonic() - begin)
        if folder:
            torch.save(held, folder / f"{rank}")
    if step >= step_of_death and not lost:
        time.sleep(0.005)  # so that death comes before the end
values = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
row = [sorted(lost), hashlib.blake2b(values).hexdigest(), optimizer.reducer.transport.group.size, seconds, float(loss)]
print("row", json.dumps(row), flush=True)
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
        ("overlap", "topk"),
        ("updates", "topk"),
        slow("inline", "dense"),
        slow("overlap", None),
        slow("updates", None),
        slow("moments", "topk"),
    ],
    ids=str,
)
def test_optimizers_go_on(job, kind, compressor):
    check_survivors(job(4, TORCH, json.dumps([kind, compressor, 20, 0.013, [1], 60])), [1])


ENDED = (
    "MPI has not reported it for",
    "another rank has died while those that are left became a group without the first one; the job ends",
)


def two_die_at_once(job):
    """Return whether the other two went on; if not, the job has ended with the error that says why."""
    printed = job(4, TORCH, json.dumps(["inline", "topk", 20, 0.01, [0, 2], 60]), status=None)
    ended = any(text in printed for text in ENDED)
    if not ended:
        check_survivors(printed, [0, 2])
    return not ended


def test_two_die_at_once(job):
    two_die_at_once(job)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_ten_pairs_die_at_once(job):
    assert sum(two_die_at_once(job) for _ in range(10)) >= 7


CRASH = """
import ctypes
import numpy as np
from mpi4py import MPI
import mpicomp

rank = MPI.COMM_WORLD.rank
reducer = mpicomp.Reducer("dense", on_failure="shrink")
for step in range(6):
    if step == 3 and rank == 1:
        ctypes.string_at(0)
    mean = reducer.reduce({"w": np.ones(100, np.float32)})["w"]
print("row", mean[0], flush=True)
reducer.close()
"""


def test_rank_that_crashes_dies_at_once(job):
    """Open MPI's handler prints a backtrace in the crashed process, which deadlocks if that held malloc's lock."""
    printed = job(3, CRASH)
    assert printed.count("row 1.0") == 2
    assert "Fatal Python error: Segmentation fault" in printed
    assert "*** Process received signal ***" not in printed


KINDS = """
import hashlib, json, os, signal, sys
import numpy as np
from mpi4py import MPI
import mpicomp

settings, step_of_death, victim = json.loads(sys.argv[1])
rank = MPI.COMM_WORLD.rank
policy = settings.pop("policy", {}) | {"warmup": 0}
reducer = mpicomp.Reducer(on_failure="shrink", bucket_bytes=40_000, policy=policy, **settings)

def perform(task, plain=type(reducer.transport).perform):
    if step == step_of_death and rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(reducer.transport, task)

reducer.transport.perform = perform
lost = []
for step in range(2 * step_of_death):
    random = np.random.default_rng([step, rank])
    shapes = {"a": (80, 100), "b": 6000}
    gradients = {name: random.standard_t(3, shape).astype(np.float32) for name, shape in shapes.items()}
    means = reducer.reduce(gradients, lr=0.1)
    lost += reducer.last_step.lost_ranks
bits = hashlib.blake2b(means["a"].tobytes() + means["b"].tobytes()).hexdigest()
print("row", json.dumps([lost, bits, reducer.transport.group.size]), flush=True)
reducer.close()
"""
_LGC = {"id": "lgc", "dense_steps": 3, "training_steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "step", "victim"),
    [
        ({}, 12, 1),
        ({"policy": {"id": "gravac"}, "compressor": "topk"}, 12, 1),
        ({"policy": {"id": "lgreco"}}, 12, 0),
        ({"policy": {"id": "flexible"}}, 12, 0),
        ({"policy": {"id": "accordion"}, "compressor": "topk"}, 12, 3),
        ({"compressor": _LGC | {"training_steps": 12}}, 8, 0),  # while it learns
        ({"compressor": _LGC}, 22, 0),
        ({"compressor": _LGC | {"instance": "server"}}, 22, 0),
        ({"compressor": _LGC | {"code": "linear"}}, 22, 1),
        ({"compressor": "fetchsgd"}, 12, 2),
        ({"compressor": "topk", "collective": "hierarchical"}, 12, 2),
    ],
    ids=str,
)
def test_what_policies_and_learned_codes_know_goes_on(job, settings, step, victim):
    check_survivors(job(4, KINDS, json.dumps([settings, step, victim])), [victim])


GROUPS = """
import hashlib, json, os, signal, sys
import numpy as np
from mpi4py import MPI
import mpicomp

victim, world = int(sys.argv[1]), MPI.COMM_WORLD
part = world.Split(world.rank % 2, world.rank)
reducer = mpicomp.Reducer("topk", comm=part, on_failure="shrink", policy={"warmup": 0})
lost = []
for step in range(20):
    if step == 9 and world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    random = np.random.default_rng([step, world.rank])
    mean = reducer.reduce({"w": random.standard_t(3, 5000).astype(np.float32)})["w"]
    lost += reducer.last_step.lost_ranks
bits = hashlib.blake2b(mean.tobytes()).hexdigest()
print("row", json.dumps([lost, bits, reducer.transport.group.size, world.rank % 2]), flush=True)
reducer.close()
"""


def test_a_rank_of_a_part_of_the_job_dies(job):
    """Two groups of three ranks: those of the dead one go on as two, and the others do not notice."""
    reports = rows(job(6, GROUPS, 2))
    assert sorted((row[0], row[2], row[3]) for row in reports) == [([], 3, 1)] * 3 + [([2], 2, 0)] * 2
    assert len({row[1] for row in reports}) == 2  # the same bits in each group


LEAVING = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpicomp

rank = MPI.COMM_WORLD.rank
reducer = mpicomp.Reducer("dense", on_failure="shrink")
for step in range(6):
    if step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reducer.reduce({"w": np.ones(100, np.float32)})
reducer.close()
sys.exit(3 if rank == 0 else 0)
"""


def test_the_status_of_a_rank_that_is_left_is_that_of_the_job(job):
    job(3, LEAVING, status=3)


LATE = """
import os, signal, time
import numpy as np
from mpi4py import MPI
import mpicomp

rank = MPI.COMM_WORLD.rank
reducer = mpicomp.Reducer("dense", on_failure="shrink")
reducer.reduce({"w": np.ones(100, np.float32)})
if rank == 0:
    time.sleep(1)  # the others have left, and wait for this one
    os.kill(os.getpid(), signal.SIGKILL)
reducer.close()
"""


def test_a_rank_dies_when_the_others_have_left(job):
    job(3, LATE)


SOME = """
import numpy as np
from mpi4py import MPI
import mpicomp

world = MPI.COMM_WORLD
part = world.Split(world.rank % 2, world.rank)
if world.rank % 2 == 0:
    reducer = mpicomp.Reducer("dense", comm=part, on_failure="shrink")
    reducer.reduce({"w": np.ones(100, np.float32)})
    reducer.close()
"""


def test_ranks_end_beside_others_without_a_reducer(job):
    """Those have no part in what the ranks agree on at their end, and come to MPI's own."""
    job(4, SOME)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thirty_kills(job, tmp_path):
    """At random moments, in random ranks; ten of them while a thread exchanges during backward.

    The end has the bits of a run that has had three ranks from the step on in which the fourth died.
    """
    random.seed(1)
    seconds = []
    for number in range(30):
        kind = "overlap" if number < 10 else random.choice(["inline", "updates"])
        victim, step, delay = random.randrange(4), random.randrange(5, 30), random.uniform(0, 0.05)
        folder = tmp_path / f"{number}"
        folder.mkdir()
        words = json.dumps([kind, "topk", step, delay, [victim], 60])
        left = [number for number in range(4) if number != victim]
        reports = check_survivors(job(4, TORCH, words, folder, [0, 1, 2, 3]), [victim])
        restarted = rows(job(3, TORCH, words, folder, left))
        assert {row[1] for row in restarted} == {row[1] for row in reports}, (
            number,
            kind,
            victim,
            step,
            reports,
            restarted,
        )
        seconds.append(max(row[3] for row in reports))
    print("seconds of the steps in which a rank died:", sorted(round(duration, 2) for duration in seconds))
    assert len(seconds) == 30


UNREPORTED = """
import os, signal, time
import numpy as np
from mpi4py import MPI
import mpicomp

rank = MPI.COMM_WORLD.rank
reducer = mpicomp.Reducer("dense", on_failure="shrink")
reducer.reduce({"w": np.ones(100, np.float32)})
if rank == 0:
    os.kill(os.getppid(), signal.SIGSTOP)  # the launcher, which reports deaths
    os.kill(os.getpid(), signal.SIGKILL)
reducer.reduce({"w": np.ones(100, np.float32)})
"""


@pytest.mark.slow
def test_death_that_mpi_does_not_report_ends_the_job(openmpi, clean_environ, tmp_path):
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "--with-ft", "ulfm", "--oversubscribe"]
    command = [*launcher, "--allow-run-as-root", "-n", "3", sys.executable, "-c", UNREPORTED]
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        job = subprocess.Popen(command, env=clean_environ | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file)
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


def test_other_mpis_are_refused(mpiexec):
    """On all ranks, with the line to use; also by an Open MPI that was started without it."""
    source = "import mpicomp; mpicomp.Reducer('dense', on_failure='shrink')"
    done = mpiexec(2, "-c", source)
    assert done.returncode != 0
    assert "on_failure='shrink' needs an MPI that outlives its ranks, got " in done.stderr
    assert "`mpiexec --with-ft ulfm -n N python ...`" in done.stderr


def test_a_setting_that_is_none():
    import mpicomp
    from mpicomp.errors import ConfigurationError, UnknownNameError
    from mpicomp.transport import LocalWorld

    with pytest.raises(UnknownNameError, match="on_failure: unknown name 'shrnk'; did you mean 'shrink'"):
        mpicomp.Reducer("dense", on_failure="shrnk", comm=LocalWorld(1).transports[0])
    with pytest.raises(ConfigurationError, match="needs ranks that are processes"):
        mpicomp.Reducer("dense", on_failure="shrink", comm=LocalWorld(1).transports[0])
