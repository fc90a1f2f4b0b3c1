"""The studies as scripts, from whatever folder, and among ranks."""

import json
import subprocess
import sys
import time
from pathlib import Path

import gpu_first_hour
import pytest
from lab.labs import lab_command, reason_without_lab
from lab_jobs import execute, last_words
from marks import slow
from study_jobs import call

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


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.skipif(reason_without_lab() is not None, reason=str(reason_without_lab()))
def test_sharded_models_are_trained_by_all_exchanges():
    """PyTorch's sums and mpicomp's come to the same loss with as many bytes; those of bfloat16 are half."""
    pytest.importorskip("torch")
    options = ["--hosts", "2", "--ppn", "2", "--bandwidth", "1gbit", "--latency", "0us"]
    study = [sys.executable, str(STUDIES / "shards.py"), "--rows", "1", "--warm-up", "1", "--steps", "20"]
    command = [*lab_command(*options), "--", *study]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()
    rows = {words[0]: [float(word) for word in words[1:]] for words in map(str.split, lines)}
    assert list(rows) == ["none", "native", "native-bf16", "dense", "auto", "muon", "diloco"]
    kilobytes, losses = ({name: row[place] for name, row in rows.items()} for place in (2, 3))
    assert losses["dense"] == pytest.approx(losses["native"], rel=1e-3)
    assert kilobytes["dense"] == pytest.approx(kilobytes["native"], rel=0.02)
    assert kilobytes["native-bf16"] == pytest.approx(kilobytes["native"] / 2, rel=0.02)
    assert 0 < kilobytes["muon"] < kilobytes["dense"] / 100
    assert kilobytes["none"] < 50


def test_crashes_and_hangs_end_with_their_process():
    status, output = gpu_first_hour.run_limited([sys.executable, "-c", "import os; os.abort()"], {}, 30.0)
    assert (status, output) == (-6, "")
    assert gpu_first_hour.run_limited([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.5) == (None, "")


def test_first_hour_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu_first_hour.device_driver, "driver", lambda: None)
    assert call(gpu_first_hour, []) == gpu_first_hour.NO_GPU
    assert capsys.readouterr().out.startswith("gpu_first_hour: no GPU to use: there is none here")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_first_hour_holds_on_the_stand_in(tmp_path, capsys):
    path = tmp_path / "lines.json"
    assert call(gpu_first_hour, ["--emulated", "--quick", "--json", str(path)]) == 0
    holds = {row["check"]: row["holds"] for row in json.loads(path.read_text())["rows"]}
    assert sum(map(bool, holds.values())) > 8
    assert holds["two ranks on one GPU: nothing is lost"]
    assert "0 do not" in capsys.readouterr().out


def test_execute_ends_with_the_command_or_the_time(tmp_path):
    log = tmp_path / "log"
    words = "import sys; print('here', flush=True); print('ValueError: there', file=sys.stderr); sys.exit(5)"
    assert execute([sys.executable, "-c", words], {}, log, 60.0) == 5
    assert log.read_text().splitlines()[0] == "here"
    assert last_words(log) == "ValueError: there"
    pid = tmp_path / "pid"
    words = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    begin = time.monotonic()
    assert execute([sys.executable, "-c", words], {}, log, 2.0) is None
    assert time.monotonic() - begin < 50
    assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("a\nb\n\n", "b"),
        ("lab: needs root\n", "lab: needs root"),
        (
            "Traceback\n  x\nmpicomp.errors.MpicompError: bad: worse\n=== EXIT CODE: 1\n",
            "mpicomp.errors.MpicompError: ",
        ),
        ("mpicomp: train: no\nsome more\n", "mpicomp: train: no"),
    ],
)
def test_last_words_are_the_last_line_of_an_error(text, last, tmp_path):
    (tmp_path / "log").write_text(text)
    assert last_words(tmp_path / "log").startswith(last)
    assert last_words(tmp_path / "none") == ""
