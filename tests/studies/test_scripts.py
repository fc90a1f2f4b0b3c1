"""The studies as scripts, from whatever folder, and among ranks."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_first_hour
import pytest
from marks import slow
from study_jobs import call

STUDIES = Path(__file__).resolve().parents[2] / "studies"
SCRIPTS = [
    path.relative_to(STUDIES)
    for path in sorted([*STUDIES.glob("*.py"), *STUDIES.glob("papers/*.py")])
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("script", [*(path if path.stem == "regret" else slow(path) for path in SCRIPTS)], ids=str)
def test_help_of_a_script_names_it(script, tmp_path, clean_environ):
    command = [sys.executable, STUDIES / script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: studies/{script}")


def test_crashes_and_hangs_end_with_their_process():
    status, output = gpu_first_hour.run_limited([sys.executable, "-c", "import os; os.abort()"], {}, 30.0)
    assert (status, output) == (-6, "")
    assert gpu_first_hour.run_limited([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.5) == (None, "")


def test_first_hour_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert call(gpu_first_hour, []) == gpu_first_hour.NO_GPU
    assert capsys.readouterr().out.startswith("gpu_first_hour: --device gpu needs CuPy")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_first_hour_holds_on_the_stand_in(tmp_path, capsys):
    path = tmp_path / "lines.json"
    assert call(gpu_first_hour, ["--emulated", "--quick", "--json", str(path)]) == 0
    holds = {row["check"]: row["holds"] for row in json.loads(path.read_text())["rows"]}
    assert sum(map(bool, holds.values())) > 8
    assert holds["two ranks on one GPU: nothing is lost"]
    assert "0 do not" in capsys.readouterr().out
