"""A training that is stopped goes on from its checkpoint: the same numbers, on another number of ranks as well."""

import json
import os
import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from marks import slow
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.tasks.digits import Digits
from mpicomp.bench.train import Checkpoints, Settings, Stopped, train_measured

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.job import stop
from mpicomp.mpi.comm import MPITransport
from mpicomp.policies import get_policy

STEPS = 12
UPDATES = {"sync_every": 3, "outer": {"lr": 0.7, "momentum": 0.9}}


class Asked(Digits):
    """Digits, of which one rank is asked to stop while it computes some step."""

    at = None

    def batch(self, step, rank, ranks):
        if step == self.at and rank == ranks - 1:
            stop.ask_to_stop()
        return super().batch(step, rank, ranks)


@pytest.fixture
def shared_folder(comm, tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "asked", False)
    return comm.bcast(tmp_path)


def run(comm, folder, name, updates=None, at=None, every=100, steps=STEPS, seed=0, checkpoints=True):
    """Train; return what came of it, and the lines of rank 0."""
    stop.asked = False
    task = Asked(seed=seed)
    task.at = at
    path = folder / f"{name}.jsonl"
    same = {"seed": seed, "exchange": "gradients" if updates is None else updates}
    saves = Checkpoints(str(folder / name), every, same) if checkpoints else None
    settings = Settings(
        mpicomp.TopK(0.05), "allgather", get_policy("static"), steps, seed, 0, probes=False, updates=updates,
        checkpoints=saves,
    )  # fmt: skip
    transport = MPITransport(comm)
    try:
        with MetricsWriter(str(path) if comm.rank == 0 else None) as metrics:
            outcome = train_measured(task, settings, transport, Progress(False), metrics)
    finally:
        transport.close()
    comm.barrier()
    return outcome, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("updates", [None, slow(UPDATES)], ids=["gradients", "updates"])
def test_stopped_training_resumes_with_the_same_bits(comm, shared_folder, updates):
    straight, expected = run(comm, shared_folder, "straight", updates, checkpoints=False)
    first, _ = run(comm, shared_folder, "stopped", updates, at=4 if updates else 5)
    assert isinstance(first, Stopped)
    stopped = first.step
    assert stopped == 6
    second, lines = run(comm, shared_folder, "stopped", updates)
    assert second.run.resumed_at == stopped
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]
    if comm.rank == 0:
        assert second.run.quality == straight.run.quality
    wire = sum(line["wire_bytes"] for line in lines[stopped:])
    assert comm.size > 1 or wire == 0
    if comm.rank == 0 and updates is None:
        assert second.run.wire_bytes == pytest.approx(wire, rel=0.02)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.timeout(120)
def test_checkpoints_have_an_interval_and_one_run(comm, shared_folder):
    run(comm, shared_folder, "often", UPDATES, every=4)
    # After 6 and 9 steps: the first exchanges behind 4 and 8. None after the last step, which has its outcome.
    assert mpicomp.load_checkpoint(shared_folder / "often", comm)["step"] == 9
    assert sorted(path.name for path in (shared_folder / "often").iterdir()) == ["checkpoint-00000002"]
    with pytest.raises(ConfigurationError, match="is of a run with seed 0, and this one has 1"):
        run(comm, shared_folder, "often", UPDATES, seed=1)
    with pytest.raises(ConfigurationError, match="was written after 9 steps, and this run has 9; name more --steps"):
        run(comm, shared_folder, "often", UPDATES, steps=9)


@pytest.mark.parametrize("step", [0, 3])
def test_metrics_may_go_nowhere(step):
    with MetricsWriter("/dev/null") as metrics:
        metrics.begin(step)
        metrics.write(lambda: {"step": step})


def test_metrics_go_on_where_the_checkpoint_is(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    for step, expected in [(5, [0, 1, 2, 5]), (2, [0, 1, 2]), (0, [0])]:
        with MetricsWriter(str(path)) as metrics:
            metrics.begin(step)
            metrics.write(lambda step=step: {"step": step})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == expected


SIGNALLED = """\
import os, signal
from mpicomp import register
from mpicomp.bench.tasks.digits import Digits

@register
class Signalled(Digits):
    name = "signalled"

    def batch(self, step, rank, ranks):
        if step == int(os.environ.get("SIGNAL_AT", -1)) and rank == 1:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return super().batch(step, rank, ranks)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_command_resumes_on_fewer_ranks(mpiexec, tmp_path, number):
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    words = "--plugin signalled.py --task signalled --compressor topk --ratio 0.05 --steps 40 --no-verdict"
    command = ["-m", "mpicomp", "train", *words.split(), "--checkpoints", "here", "--json", "out.json"]
    threads = {"OMP_NUM_THREADS": "1"}
    signalled = {"SIGNAL": str(int(number)), "SIGNAL_AT": "7"} | threads
    done = mpiexec(3, *command, timeout=120, cwd=tmp_path, env=signalled)
    assert done.returncode == mpicomp.STOPPED == os.EX_TEMPFAIL, done.stderr
    assert "stopped after step 8 of 40: a checkpoint is in 'here'" in done.stdout
    assert "left with status" not in done.stderr
    assert not (tmp_path / "out.json").exists()
    done = mpiexec(2, *command, timeout=120, cwd=tmp_path, env=threads)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 8\n" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["resumed_at"], result["ranks"], result["steps"]) == (8, 2, 40)
    assert result["dense_bytes"] == 4 * result["parameters"] * 32
    assert result["quality"]["value"] > 0.5  # ten classes
    done = mpiexec(2, *command, "--seed", "1", timeout=120, cwd=tmp_path, env=threads)
    assert done.returncode == 2
    assert "is of a run with seed 0, and this one has 1" in done.stderr
