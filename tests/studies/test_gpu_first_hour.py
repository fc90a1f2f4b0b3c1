"""The checks for the first hour with a GPU, without one: on the stand-ins, and by what their lines are made of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_first_hour
import pytest
from gpu import device
from gpu_first_hour import CHECKS, Check, Line, Setting, lines_of_kernels
from study_words import call

SCRIPT = Path(gpu_first_hour.__file__)
NEED_A_GPU = {
    *("kernels", "torch: side stream", "pinned copies", "2,147,483,653 elements"),
    *("direct route", "compute-sanitizer: a planted fault"),
    *(f"compute-sanitizer: {tool}" for tool in ("memcheck", "racecheck", "initcheck", "synccheck")),
}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_all_of_it_on_stand_ins(tmp_path, clean_environ):
    path = tmp_path / "lines.json"
    command = [sys.executable, SCRIPT, "--emulated", "--quick", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, header, *table, last = done.stdout.splitlines()
    assert first == "gpu_first_hour: a stand-in"
    assert header.split() == ["check", "expected", "measured", "holds"]
    rows = json.loads(path.read_text())["rows"]
    assert len(table) == len(rows)
    for line, row in zip(table, rows, strict=True):
        assert line.startswith(row["check"])
        assert line.endswith({True: " yes", False: " no", None: " -"}[row["holds"]])
    holds = {row["check"]: row["holds"] for row in rows}
    assert {row["check"] for row in rows if row["measured"] == "needs a GPU"} == NEED_A_GPU
    assert all(holds[f"bits: {name}"] for name in ("topk", "onebit", "dense"))
    assert holds["two ranks on one GPU: means"]
    assert holds["two ranks on one GPU: nothing is lost"]
    assert holds["bytes: topk, to the GPU"]
    if shutil.which("g++") is not None:
        assert holds["launches: topk"]
    assert last.startswith(f"gpu_first_hour: {sum(map(bool, holds.values()))} hold, 0 do not")


def test_without_a_gpu_it_says_so(capfd, monkeypatch):
    monkeypatch.setattr(gpu_first_hour, "_children", lambda *arguments: ([], None))
    assert call(gpu_first_hour, []) == 3
    shown = capfd.readouterr().out
    assert shown.count("\n") == 1
    assert shown.startswith("gpu_first_hour: no GPU to use: there is none here")


def checked(monkeypatch, tmp_path, code, limit_s=30.0):
    """Run one check whose process runs this code; return its lines and its problem."""
    script = tmp_path / "check.py"
    script.write_text(code)
    monkeypatch.setattr(gpu_first_hour, "__file__", str(script))
    arguments = gpu_first_hour.parser().parse_args(["--quick"])
    return gpu_first_hour._children("bits", CHECKS["bits"], arguments, tmp_path, limit_s)


def test_a_check_that_crashes_takes_no_other_with_it(monkeypatch, tmp_path):
    assert checked(monkeypatch, tmp_path, "import os; os.abort()") == ([], "ended by SIGABRT: ")
    code = "class CUDAError(Exception): pass\nraise CUDAError('an illegal memory access')"
    assert checked(monkeypatch, tmp_path, code) == ([], "status 1: CUDAError: an illegal memory access")


def test_a_check_that_hangs_is_ended(monkeypatch, tmp_path):
    assert checked(monkeypatch, tmp_path, "import time; time.sleep(60)", 0.5) == ([], "no end after 0 s")


def test_what_fails_is_counted(monkeypatch, capsys):
    def children(name, check, arguments, scratch, limit_s):
        return ([Line("GPU", "one", "NVIDIA H100", True)], None) if name == "look" else ([], "status 1: no")

    monkeypatch.setattr(gpu_first_hour, "_children", children)
    monkeypatch.setattr(gpu_first_hour, "CHECKS", {"one": Check("one", "holds", lambda setting: [], 1.0)})
    assert call(gpu_first_hour, []) == 1
    assert "0 hold, 1 do not" in capsys.readouterr().out


def test_when_the_time_is_over_no_check_begins(monkeypatch, capsys):
    monkeypatch.setattr(gpu_first_hour, "_TOTAL_S", 0.0)
    assert call(gpu_first_hour, ["--emulated"]) == 1
    assert "not begun: 0 s are over" in capsys.readouterr().out


def row(name, median_s, copies):
    behind = {"behind_s": median_s, "behind_copies": copies}
    return {"name": name, "numel": 1 << 26, "median_s": 2 * median_s, "copies": copies} | behind


def test_bounds_of_kernels():
    rows = [row("memcpy", 2e-4, 1.0), row("topk.compress", 4e-4, 2.0), row("sidco.compress", 8e-4, 4.0)]
    slow = [*rows, row("torch.topk", 16e-4, 8.0)]
    assert [line.holds for line in lines_of_kernels(slow)] == [True, False, False, True]
    assert [line.holds for line in lines_of_kernels([*rows, row("torch.topk", 24e-4, 12.0)])] == [
        True,
        False,
        True,
        True,
    ]
    assert [line.holds for line in lines_of_kernels(rows)] == [True, False, None, True]
    assert [line.holds for line in lines_of_kernels(slow, quick=True)] == [None, None, None, True]


@pytest.fixture
def setting(monkeypatch, tmp_path):
    """What a check is given on a GPU, with a stand-in for it."""
    return Setting(emulated=False, quick=True, cupy=device.install(monkeypatch), scratch=tmp_path)


def test_a_sweep_over_more_elements_than_an_index_reaches(setting, monkeypatch):
    free = [100e9, 100e9]
    setting.cupy.cuda.runtime.memGetInfo = lambda: free
    monkeypatch.setattr(gpu_first_hour, "_LARGE", 100_003)
    lines = gpu_first_hour.sweep_large(setting)
    assert [(line.measured, line.holds) for line in lines] == [("100,003", True)] * 2
    free[0] = 10e9
    [line] = gpu_first_hour.sweep_large(setting)
    assert (line.measured, line.holds) == ("needs 40 GB of free GPU memory, 10.0 are", None)


def test_pinned_copies(setting, monkeypatch):
    monkeypatch.setattr(gpu_first_hour, "_PINNED_BYTES", 1 << 16)
    *rates, same = gpu_first_hour.time_pinned(setting)
    assert [line.check for line in rates] == ["pinned copies to the GPU", "pinned copies to the host"]
    assert (same.measured, same.holds) == ("the same", True)


@pytest.mark.parametrize(("status", "said"), [(0, "ERROR SUMMARY: 0 errors"), (99, "ERROR SUMMARY: 3 errors")])
def test_what_compute_sanitizer_says(status, said, setting, monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '========= {said}'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_first_hour, "_sanitizer", lambda: str(tool))
    [line] = gpu_first_hour.sanitize(setting, "memcheck")
    assert (line.measured, line.holds) == (f"{said} (status {status})", status == 0)


def test_a_tool_that_is_not_there_is_no_failure(setting, monkeypatch):
    monkeypatch.setattr(gpu_first_hour, "_sanitizer", lambda: None)
    [line] = gpu_first_hour.sanitize(setting, "racecheck")
    assert (line.measured, line.holds) == ("not installed", None)
    assert gpu_first_hour.run_short(Setting(True, True, setting.cupy, setting.scratch)) == []
