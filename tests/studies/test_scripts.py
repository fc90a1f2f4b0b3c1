"""The studies as scripts, from whatever folder, and among ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow

STUDIES = Path(__file__).resolve().parents[2] / "studies"
SCRIPTS = [
    path.relative_to(STUDIES)
    for path in sorted([*STUDIES.glob("*.py"), *STUDIES.glob("papers/*.py")])
    if "parser()" in path.read_text()
]


@pytest.mark.parametrize("script", [*(path if path.stem == "policies" else slow(path) for path in SCRIPTS)], ids=str)
def test_help_of_a_script_names_it(script, tmp_path, clean_environ):
    command = [sys.executable, STUDIES / script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: studies/{script}")


@pytest.mark.parametrize("ranks", [slow(1), slow(3)])
def test_change_among_ranks_runs_auto(mpiexec, tmp_path, ranks):
    path = tmp_path / "steps.json"
    words = ["--seconds", "3", "--bandwidths", "1gbit,50mbit", "--numel", "1000", "--json", path]
    done = mpiexec(ranks, STUDIES / "change.py", *words, timeout=60)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert set(written) == {"schema", "steps"}
    assert len(written["steps"]) > 0
    assert all(" s  step" in line for line in done.stdout.splitlines())


def test_study_without_ranks_runs_on_one(mpiexec):
    words = ["--numel", "1000", "--ratio", "0.1", "--steps", "1", "--data", "normal"]
    done = mpiexec(2, STUDIES / "estimators.py", *words, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("normal: 26 steps") == 1


def test_several_ranks_print_an_error_once(mpiexec):
    done = mpiexec(2, STUDIES / "change.py", "--seconds", "0")
    assert done.returncode == 2
    assert done.stderr.count("mpicomp: change: --seconds must be a number above 0, got 0.0") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_observing_prints_what_traces_cost(mpiexec):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    done = mpiexec(2, STUDIES / "observing.py", "--turns", "4", "--steps", "3", timeout=100)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["ranks"], row["steps"]) == (2, 6)
    assert min(row["median_step_s"], row["median_watched_step_s"]) > 0
    assert 0 < row["inside"] < 0.5
    assert 500 < row["trace_bytes_a_step_and_rank"] < 20000


@pytest.mark.slow
def test_checks_write_what_checks_cost(mpiexec, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path = tmp_path / "checks.json"
    done = mpiexec(2, STUDIES / "checks.py", "--task", "digits", "--steps", "20", "--json", path, timeout=100)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert written["ratio"] == pytest.approx(written["on_s"] / written["off_s"])
    assert written["interval"][0] <= written["ratio"] <= written["interval"][1]
    assert 0 < written["replicas"] < written["inside"] < 0.5
    assert written["inside_interval"][0] <= written["inside"] <= written["inside_interval"][1]
