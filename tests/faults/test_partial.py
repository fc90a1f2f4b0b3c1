"""A rank that is slow, stopped for a while or out of memory, and a disk that is full: what can go on does."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from marks import slow

import mpicomp
from mpicomp.reducer import telemetry

pytestmark = pytest.mark.timeout(120)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_record_names_the_slow_rank(comm):
    """And what it costs, from the 20th step on."""
    reducer = mpicomp.Reducer("topk", "allgather", comm=comm)
    late = comm.size - 1
    for step in range(2 * telemetry.PACE_STEPS):
        time.sleep(0.03 if comm.rank == late else 0.0)
        reducer.reduce({"w": np.full(1000, comm.rank + 1.0, np.float32)})
        record = reducer.last_step
        if step < telemetry.PACE_STEPS:
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


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--exchange", "updates", "--every", "2"]], ids=str)
def test_outcome_of_train_names_the_slow_rank(mpiexec, tmp_path, more):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    file = tmp_path / "o.json"
    done = mpiexec(2, "-c", TRAIN, "--no-verdict", "--json", file, *more, timeout=100)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(file.read_text())
    assert outcome["slowest_rank"] == 1
    assert 0.025 < outcome["slowest_costs_s"] < outcome["median_step_s"] + 0.05


STEPS = """
import hashlib, json, os, sys, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpicomp

rank, folder = MPI.COMM_WORLD.rank, Path(sys.argv[1])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
reducer = mpicomp.Reducer("topk", sys.argv[2])
digest = hashlib.blake2b()
for step in range(200):
    gradient = np.random.default_rng([step, rank]).standard_t(3, 3000).astype(np.float32)
    digest.update(reducer.reduce({"w": gradient})["w"].tobytes())
    if step == 20 and rank == 0:
        (folder / "runs").touch()
    time.sleep(0.002)
digest.update(reducer.residual("w").tobytes())
print(f"bits {rank} {digest.hexdigest()}\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["allgather", "star-topk:ring"])
def test_stopped_rank_is_named_and_changes_nothing(mpiexec, tmp_path, collective):
    def bits(done):
        assert done.returncode == 0, done.stderr
        return sorted(re.findall(r"bits \d \w+", done.stdout))

    def stop():
        while not (tmp_path / "runs").exists():
            time.sleep(0.001)
        victim = int((tmp_path / "pid-1").read_text())
        os.kill(victim, signal.SIGSTOP)
        time.sleep(3)
        os.kill(victim, signal.SIGCONT)

    env = {"MPICOMP_STALL": "1.5"}  # others of a busy machine are late by less
    undisturbed = mpiexec(3, "-c", STEPS, tmp_path, collective, env=env)
    assert "rank 1 is not there" not in undisturbed.stderr
    (tmp_path / "runs").unlink()
    thread = threading.Thread(target=stop)
    thread.start()
    disturbed = mpiexec(3, "-c", STEPS, tmp_path, collective, env=env)
    thread.join()
    assert bits(disturbed) == bits(undisturbed)
    assert re.search(r"rank 1 is not there \(rank 1 is not answering: stopped", disturbed.stderr)


LIMIT = """
import resource, sys, time
import numpy as np
from mpi4py import MPI
import mpicomp

rank = MPI.COMM_WORLD.rank
reducer = mpicomp.Reducer("topk", "allgather")
gradient = np.ones(30_000_000, np.float32)
reducer.reduce({"w": gradient[:1000]})
if rank == 1:
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 100_000_000, resource.RLIM_INFINITY))
begin = time.monotonic()
try:
    reducer.reduce({"w": gradient[:1000], "large": gradient})
except MemoryError as error:
    print(f"{time.monotonic() - begin:.2f} s: {type(error).__name__} {error}\\n", end="", flush=True)
mean = reducer.reduce({"w": gradient[:1000]})["w"]
print(f"goes on {mean.max()}\\n", end="", flush=True)
"""


def test_rank_without_memory_for_a_step_is_one_error(mpiexec):
    done = mpiexec(3, "-c", LIMIT)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^(\S+) s: OutOfMemoryError (reduce: no memory is left .*)$", done.stdout, flags=re.M)
    assert len(said) == 3
    assert len({text for _, text in said}) == 1
    assert "Unable to allocate" in said[0][1]
    assert said[0][1].endswith("(on rank 1)")
    assert done.stdout.count("goes on") == 3


MIDDLE = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpicomp
from mpicomp.mpi.comm import MPITransport

reducer = mpicomp.Reducer("topk", "star-topk:ring")
gradient = {"w": np.ones(5000, np.float32)}
reducer.reduce(gradient)
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    rounds = 0
    def fails(self, *words, plain=MPITransport.perform):
        global rounds
        rounds += 1
        if rounds == 2:
            print(time.time(), flush=True)
            raise MemoryError("no memory is left")
        return plain(self, *words)
    MPITransport.perform = fails
try:
    reducer.reduce(gradient)
except MemoryError:
    if sys.argv[1] == "raise":
        raise
    time.sleep(60)
"""


@pytest.mark.parametrize("then", [slow("raise"), "sleep"])
def test_rank_without_memory_in_an_exchange_ends_the_job(mpiexec, then):
    """Within two seconds, also where the error is caught, and the rank does something else."""
    done = mpiexec(3, "-c", MIDDLE, then)
    ended = time.time()
    assert done.returncode != 0
    assert "MemoryError: no memory is left" in done.stderr
    assert re.search(
        "rank 1 (of 3: uncaught exception, ending the job|broke off a round in which rank [02] still waits)",
        done.stderr,
    )
    print(f"{ended - float(done.stdout.split()[0]):.2f} s from the error to the end of the job")


@pytest.fixture
def disk(tmp_path):
    """Give a folder on a disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk needs root, and the right to mount one")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


SAVES = """
import sys
import numpy as np
from mpi4py import MPI
import mpicomp

rank = MPI.COMM_WORLD.rank
state = {"w": np.full(15_000 if rank != 1 else 40_000, rank, np.float64), "step": 1}
reducer = mpicomp.Reducer("topk", "allgather")
mpicomp.save_checkpoint(sys.argv[1], state)
try:
    mpicomp.save_checkpoint(sys.argv[1], state | {"step": 2})
except mpicomp.errors.CheckpointError as error:
    print(f"said {error}\\n", end="", flush=True)
reducer.reduce({"w": np.ones(1000, np.float32)})
loaded = mpicomp.load_checkpoint(sys.argv[1])
assert loaded["step"] == 1 and (loaded["w"] == state["w"]).all()
print("goes on\\n", end="", flush=True)
"""


def test_full_disk_is_one_error_and_keeps_the_last_checkpoint(mpiexec, disk):
    done = mpiexec(3, "-c", SAVES, disk)
    assert done.returncode == 0, done.stderr
    said = re.findall("^said (.*)$", done.stdout, flags=re.M)
    assert len(said) == 3, done.stdout
    assert len(set(said)) == 1
    assert "No space left on device" in said[0]
    assert "Older ones are unchanged" in said[0]
    assert done.stdout.count("goes on") == 3
    assert [path.name for path in disk.iterdir()] == ["checkpoint-00000001"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["metrics", "json"])
def test_training_without_writable_files_ends_with_an_error(mpiexec, disk, what):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    file = disk / "file.json"
    file.write_text("old")
    filled = disk / "filled"
    with contextlib.suppress(OSError), filled.open("wb", buffering=0) as other:
        while other.write(b"0" * 4096):
            pass
    if what == "metrics":
        os.truncate(filled, filled.stat().st_size - 20_000)
    words = ["--task", "digits", "--compressor", "topk", "--steps", "30", "--no-verdict", f"--{what}", file]
    done = mpiexec(2, "-m", "mpicomp", "train", *words, timeout=100)
    assert done.returncode == 2
    assert "held-out accuracy: 0." in done.stdout
    assert "No space left on device" in done.stderr
    assert "mpicomp: rank " not in done.stderr  # as an error begins that is not the same on all ranks
    assert sorted(path.name for path in disk.iterdir()) == ["file.json", "filled"]
    if what == "json":
        assert file.read_text() == "old"
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert 0 < len(lines) < 30
        assert f"has no line of step {len(lines)} and those after it" in done.stderr
        assert "Training continues, and ends with this error" in done.stderr
