"""The template as it is shipped meets its time limit, queues up again, and ends with the bits of a job that did not."""

import re

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
    """Give what each rank has in the one checkpoint of a folder."""
    [checkpoint] = folder.glob("[0-9]*")
    files = sorted(checkpoint.iterdir())
    assert len(files) == RANKS
    return [load_file(file) for file in files]


@pytest.mark.slow
def test_it_meets_its_limit_and_resumes(slurm, mpich, mpiexec, tmp_path):
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


WAITS = """\
import os, sys, time

print("started", flush=True)
while not os.path.exists(os.path.join(sys.argv[2], "stop")):
    time.sleep(0.1)
"""


def test_a_job_that_may_not_be_requeued_says_how_to_go_on(slurm, stand_in, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)

    def signal_it(number):
        if any("started" in file.read_text() for file in tmp_path.glob("*.out")):
            slurm.run("scancel", "--batch", "--signal=USR1", number)

    knobs = {"SCRIPT": "waits.py", "VENV": stand_in, "LAUNCH": "none", "CHECKPOINTS": "mine"}
    job = submit(slurm, tmp_path, "train_requeue.sbatch", "--no-requeue", meanwhile=signal_it, **knobs)
    assert (job.states, job.statuses, job.restarts) == (["FAILED"], [1], 0)
    assert f"Requested operation is presently disabled for job {job.number}\n" in job.printed
    assert "train_requeue: to go on, submit again with CHECKPOINTS=mine\n" in job.printed


def test_a_script_that_fails_is_not_requeued(slurm, stand_in, tmp_path):
    (tmp_path / "fails.py").write_text("import sys; sys.exit(3)")
    knobs = {"SCRIPT": "fails.py", "VENV": stand_in, "LAUNCH": "none"}
    job = submit(slurm, tmp_path, "train_requeue.sbatch", **knobs)
    assert (job.states, job.restarts) == (["FAILED"], 0)
    # The first rank that fails ends the others, which srun may tell as their status: 128 and SIGTERM.
    assert job.statuses in ([3], [143]), job.printed
