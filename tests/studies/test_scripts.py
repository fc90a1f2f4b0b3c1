"""The studies as scripts, from whatever folder."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inside import Inside, instead
from marks import slow

STUDIES = Path(__file__).resolve().parents[2] / "studies"


@pytest.mark.parametrize(
    "name",
    [
        "policies",
        *map(
            slow,
            (
                "learned",
                "regret",
                "change",
                "estimators",
                "behind",
                "hindsight",
                "checks",
                "observing",
                "updates",
                "peers",
                "half_precision",
                "constants",
                "dynamics",
                "gloo",
            ),
        ),
    ],
)
def test_the_help_of_each(name, tmp_path, clean_environ):
    command = [sys.executable, STUDIES / f"{name}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: studies/{name}.py")


@pytest.mark.parametrize("ranks", [slow(1), slow(3)])
def test_steps_of_auto_among_ranks(mpiexec, tmp_path, ranks):
    path = tmp_path / "steps.json"
    words = ["--seconds", "3", "--bandwidths", "1gbit,50mbit", "--numel", "1000", "--json", path]
    done = mpiexec(ranks, STUDIES / "change.py", *words, timeout=60)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert set(written) == {"schema", "steps"}
    assert len(written["steps"]) > 0
    assert all(" s  step" in line for line in done.stdout.splitlines())


def test_of_several_ranks_one_runs_what_needs_no_ranks(mpiexec):
    words = ["--numel", "1000", "--ratio", "0.1", "--steps", "1", "--data", "normal"]
    done = mpiexec(2, STUDIES / "estimators.py", *words, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("normal: 26 steps") == 1


def test_what_is_wrong_is_told_once(mpiexec):
    done = mpiexec(2, STUDIES / "change.py", "--seconds", "0")
    assert done.returncode == 2
    assert done.stderr.count("mpicomp: change: --seconds must be a number above 0, got 0.0") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_it_costs_to_be_watched(mpiexec):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    done = mpiexec(2, STUDIES / "observing.py", "--turns", "4", "--steps", "3", timeout=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["ranks"], told["steps"]) == (2, 6)
    assert told["median_step_s"] > 0
    assert told["median_watched_step_s"] > 0
    assert 0 < told["inside"] < 0.5
    assert 500 < told["trace_bytes_a_step_and_rank"] < 20000


@pytest.mark.slow
def test_what_checks_cost(mpiexec, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path = tmp_path / "checks.json"
    done = mpiexec(2, STUDIES / "checks.py", "--task", "digits", "--steps", "20", "--json", path, timeout=100)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert written["ratio"] == pytest.approx(written["on_s"] / written["off_s"])
    assert 0 < written["replicas"] < 0.1
    assert written["interval"][0] <= written["ratio"] <= written["interval"][1]
    assert written["replicas"] < written["inside"] < 0.5
    assert written["inside_interval"][0] <= written["inside"] <= written["inside_interval"][1]


def test_seconds_inside_of_calls(monkeypatch):
    """Each once, whichever calls which; of rounds what is waited for as well."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Worker:
        def work(self, seconds):
            now[0] += seconds
            return seconds

        def both(self):
            return self.work(1.0) + self.work(2.0)

        def rounds(self):
            yield self.work(4.0)
            yield self.work(8.0)

    counts = Inside()
    counted = [(Worker, name, counts.of(getattr(Worker, name))) for name in ("work", "both")]
    with instead(*counted, (Worker, "rounds", counts.of_rounds(Worker.rounds))):
        assert Worker().both() == 3.0
        assert counts.seconds == 3.0
        for _ in Worker().rounds():
            now[0] += 16.0
        assert counts.seconds == 3.0 + 4.0 + 8.0 + 2 * 16.0
    Worker().both()
    assert counts.seconds == 47.0
