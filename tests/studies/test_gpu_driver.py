"""The driver of the first hour with a GPU: what crashes or hangs takes nothing else with it."""

import json
import sys

import gpu_first_hour
import pytest
from study_words import call


def test_crashes_and_hangs_end_with_their_process():
    status, output = gpu_first_hour.run_limited([sys.executable, "-c", "import os; os.abort()"], {}, 30.0)
    assert (status, output) == (-6, "")
    assert gpu_first_hour.run_limited([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.5) == (None, "")


def test_first_hour_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu_first_hour.places_driver, "driver", lambda: None)
    assert call(gpu_first_hour, []) == gpu_first_hour.NO_GPU
    assert capsys.readouterr().out.startswith("gpu_first_hour: no GPU to use: there is none here")


def test_first_hour_begins_no_check_when_time_is_over(capsys, monkeypatch):
    monkeypatch.setattr(gpu_first_hour, "_TOTAL_S", 0.0)
    assert call(gpu_first_hour, ["--emulated"]) == 1
    assert "not begun: 0 s are over" in capsys.readouterr().out


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_first_hour_holds_on_the_stand_in(tmp_path, capsys):
    path = tmp_path / "lines.json"
    assert call(gpu_first_hour, ["--emulated", "--quick", "--json", str(path)]) == 0
    holds = {row["check"]: row["holds"] for row in json.loads(path.read_text())["rows"]}
    assert sum(map(bool, holds.values())) > 8
    assert holds["two ranks on one GPU: nothing is lost"]
    assert "0 do not" in capsys.readouterr().out
