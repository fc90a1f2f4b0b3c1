"""The template as it is shipped: it stops on signals and requeues itself, and goes on when nodes fail."""

import json
import re
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import load_file
from slurm.jobs import SLURM, submit

pytestmark = pytest.mark.timeout(500)

STEPS = 200
RANKS = 2
ARGS = f"--steps {STEPS} --collective allgather"

# The example with a step so slow that the first run cannot end within its limit of four minutes.
SLOW = f"""\
import os, runpy, time
from mpi4py import MPI
from mpicomp.bench.tasks.digits import Digits

if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    batch = Digits.batch
    Digits.batch = lambda *arguments: time.sleep(2) or batch(*arguments)
runpy.run_path({str(SLURM / "train.py")!r}, run_name="__main__")
"""


def states(folder):
    """Return each rank's part of the one checkpoint of a folder."""
    [checkpoint] = folder.glob("checkpoint-*")
    files = sorted(checkpoint.iterdir())
    assert len(files) == RANKS
    return [load_file(file) for file in files]


@pytest.mark.slow
def test_job_at_its_limit_resumes(slurm, mpich, mpiexec, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    # Slurm looks at limits every half minute, and sends the signal when no more than --signal and that is left: here 15
    # to 45 seconds after the start. What remains is for machines on which it takes long to start.
    options = (f"--nodes={RANKS}", "--cpus-per-task=1", "--time=4", "--signal=B:USR1@195")

    def give_time(number):
        # What is left takes a second or so, but not where it takes minutes to start: there it would end early again.
        if "Restarts=1 " in slurm.run("scontrol", "--oneliner", "show", "job", number).stdout:
            slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")

    knobs = {"SCRIPT": "slow.py", "ARGS": ARGS}
    job = submit(slurm, tmp_path, "train_requeue.sbatch", *options, meanwhile=give_time, **knobs)
    assert job.states == ["COMPLETED"], job.printed
    assert job.restarts == 1, job.printed
    [stopped] = re.findall(rf"stopped after step (\d+) of {STEPS}", job.printed)
    assert 0 < int(stopped) < STEPS
    assert f"resumed at step {stopped}\n" in job.printed
    assert f"{STEPS} steps on {RANKS} ranks" in job.printed
    assert "DUE TO TIME LIMIT" not in job.printed

    command = [SLURM / "train.py", "--checkpoints", tmp_path / "straight", *ARGS.split()]
    done = mpiexec(RANKS, *command, timeout=200, env={"OMP_NUM_THREADS": "1", "MPICOMP_NAPS": "1"})
    assert done.returncode == 0, done.stderr
    for mine, straight in zip(
        states(tmp_path / f"checkpoints-{job.number}"), states(tmp_path / "straight"), strict=True
    ):
        assert mine.keys() == straight.keys()
        assert len(mine) > 8
        for name, array in straight.items():
            np.testing.assert_array_equal(mine[name], array, err_msg=name)


# A task whose first run waits at a step until a file is gone, so that something can be done to the job meanwhile.
HELD_AT = 25
HELD = f"""\
import os, time
from mpicomp import register
from mpicomp.bench.tasks.digits import Digits

@register
class HeldDigits(Digits):
    name = "held-digits"

    def batch(self, step, rank, ranks):
        if step == {HELD_AT} and not os.path.exists("reached"):
            open("reached", "w").close()
        while step >= {HELD_AT} and "SLURM_RESTART_COUNT" not in os.environ and os.path.exists("hold"):
            time.sleep(0.05)
        return super().batch(step, rank, ranks)
"""
TRAIN = (
    "--plugin held.py --task held-digits --compressor topk --ratio 0.05 --collective allgather --steps 60 "
    "--checkpoint-every 10 --no-verdict"
)


def set_state(slurm, nodes, state):
    done = slurm.run("scontrol", "update", f"NodeName={nodes}", f"State={state}", "Reason=test")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def all_nodes(slurm):
    """Restore all nodes afterwards."""
    yield
    slurm.run("scontrol", "update", "NodeName=n[1-4]", "State=RESUME")
    slurm.wait()


def check_goes_on(mpiexec, tmp_path, job, stopped, ranks):
    """Compare the second part of a job with a run that was started by hand from a copy of the checkpoint."""
    assert job.states == ["COMPLETED"], job.printed
    assert job.restarts == 1, job.printed
    assert f"resumed at step {stopped}\n" in job.printed
    result = json.loads((tmp_path / f"train_requeue-{job.number}.json").read_text())
    assert (result["resumed_at"], result["ranks"], result["steps"]) == (stopped, ranks, 60)
    lines = [json.loads(line) for line in (tmp_path / f"train_requeue-{job.number}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(60))
    command = ["-m", "mpicomp", "train", *TRAIN.split(), "--checkpoints", "copy", "--metrics", "by-hand.jsonl"]
    done = mpiexec(ranks, *command, timeout=200, env={"OMP_NUM_THREADS": "1", "MPICOMP_NAPS": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    by_hand = [json.loads(line) for line in (tmp_path / "by-hand.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in by_hand] == [line["loss"] for line in lines[stopped:]]


@pytest.mark.slow
def test_node_that_is_down_is_left_out(slurm, mpich, mpiexec, all_nodes, tmp_path):
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()  # for good: the ranks that are left wait until they are killed, as for a dead one

    def set_one_down(number):
        if not (tmp_path / "copy").exists() and (tmp_path / "reached").exists():
            shutil.copytree(tmp_path / f"checkpoints-{number}", tmp_path / "copy")
            set_state(slurm, "n3", "DOWN")
            set_state(slurm, "n3", "DRAIN")  # its daemon lives on, and would bring it back

    job = submit(slurm, tmp_path, "train_requeue.sbatch", "--cpus-per-task=1", meanwhile=set_one_down, ARGS=TRAIN)
    assert "DUE TO NODE FAILURE" in job.printed
    (tmp_path / "hold").unlink()
    check_goes_on(mpiexec, tmp_path, job, 20, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ask", [("--batch", "--signal=USR1"), ("--signal=USR1",), ("--signal=TERM",)], ids=" ".join)
def test_signaled_job_resumes_on_more_nodes(slurm, mpich, mpiexec, all_nodes, tmp_path, ask):
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    set_state(slurm, "n[3-4]", "DRAIN")
    asked = []

    def stop(number):
        if not asked and (tmp_path / "reached").exists():
            asked.append(number)
            slurm.run("scancel", *ask, number)
            set_state(slurm, "n[3-4]", "RESUME")
            (tmp_path / "hold").unlink()
        if (
            asked
            and not (tmp_path / "copy").exists()
            and "JobState=PENDING" in slurm.run("scontrol", "--oneliner", "show", "job", number).stdout
        ):
            shutil.copytree(tmp_path / f"checkpoints-{number}", tmp_path / "copy")

    job = submit(slurm, tmp_path, "train_requeue.sbatch", "--cpus-per-task=1", meanwhile=stop, ARGS=TRAIN)
    [stopped] = [int(step) for step in re.findall(r"stopped after step (\d+) of 60", job.printed)]
    assert stopped == HELD_AT + 1
    check_goes_on(mpiexec, tmp_path, job, stopped, 4)


STOPS = """\
import signal, sys, time

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("started", flush=True)
time.sleep(60)
"""


def started(folder):
    return any("started" in file.read_text() for file in folder.glob("*.out"))


def test_job_without_requeue_names_the_command(slurm, stand_in, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)

    def signal_it(number):
        if started(tmp_path):
            slurm.run("scancel", "--batch", "--signal=USR1", number)

    knobs = {"SCRIPT": "stops.py", "VENV": stand_in, "LAUNCH": "none", "CHECKPOINTS": "mine"}
    options = ("--no-requeue", "--nodes=1")
    job = submit(slurm, tmp_path, "train_requeue.sbatch", *options, meanwhile=signal_it, **knobs)
    assert (job.states, job.statuses, job.restarts) == (["FAILED"], [75], 0)
    assert f"Requested operation is presently disabled for job {job.number}\n" in job.printed
    assert "train_requeue: to go on, submit again with CHECKPOINTS=mine\n" in job.printed


def test_canceled_job_does_not_come_back(slurm, stand_in, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)

    def cancel(number):
        if started(tmp_path):
            slurm.run("scancel", number)

    knobs = {"SCRIPT": "stops.py", "VENV": stand_in, "LAUNCH": "none"}
    job = submit(slurm, tmp_path, "train_requeue.sbatch", "--nodes=1", meanwhile=cancel, **knobs)
    assert job.states == ["CANCELLED"], job.printed
    # Its script may take until Slurm kills it.
    deadline = time.monotonic() + 30
    while slurm.run("squeue", "--noheader", f"--jobs={job.number}").stdout.strip() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "Restarts=0 " in slurm.run("scontrol", "--oneliner", "show", "job", job.number).stdout


def test_failed_script_is_not_requeued(slurm, stand_in, tmp_path):
    (tmp_path / "fails.py").write_text("import sys; sys.exit(3)")
    knobs = {"SCRIPT": "fails.py", "VENV": stand_in, "LAUNCH": "none"}
    job = submit(slurm, tmp_path, "train_requeue.sbatch", **knobs)
    assert (job.states, job.restarts) == (["FAILED"], 0)
    # The first rank that fails ends the others, which srun may report as their status: 128 and SIGTERM.
    assert job.statuses in ([3], [143]), job.printed
