"""Studies that start trainings, on stand-ins for their processes: policies and hindsight."""

import importlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import lab_jobs
import numpy as np
import pytest
from policy_runs import mean_over_steps, steps_to
from study_jobs import CHOOSING_S, FAST, MEDIAN_S, SLOW, Jobs, call, stand_in
from tables import check_types, documented

NETWORKS = ("--networks", "50mbit/1ms,1gbit/0us")
WORDS = {
    "policies": ["--policies", "static,auto", *NETWORKS],
    "hindsight": ["--tasks", "text-lstm", "--plans", "qsgd4,topk1", *NETWORKS, "--choose", "0,1", "--seeds", "2,3"],
}
HEADINGS = {"policies": ("Rows of policies", "Runs of policies"), "hindsight": ("Rows of hindsight",)}


@pytest.fixture
def jobs(monkeypatch):
    return stand_in(monkeypatch, Jobs())


@pytest.fixture
def study(jobs, tmp_path, capsys):
    """Run a study; return its status, what it wrote and what it printed."""

    def run(name, *more):
        path = tmp_path / "out.json"
        words = [*WORDS[name], "--keep", str(tmp_path / "kept"), "--json", str(path), *more]
        status = call(importlib.import_module(name), words)
        return status, json.loads(path.read_text()), capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", WORDS)
def test_study_writes_documented_rows_and_resumes(name, study, jobs, tmp_path):
    status, written, shown = study(name)
    assert status == 0
    assert list(written) == ["schema", "environment", "rows", "runs"]
    assert len(written["runs"]) == len(jobs.commands) == shown.count(" left, about ")
    assert str(tmp_path) not in json.dumps(written)
    for kind, heading in zip(("rows", "runs"), HEADINGS[name], strict=False):
        fields = documented("studies.md", heading)
        assert len(fields) > 10
        for row in written[kind]:
            assert list(row) == list(fields)
            check_types(row, fields)
    again = jobs.commands.pop()
    torn = Path(again[again.index("--json") + 1])
    torn.write_text(torn.read_text()[:-5])
    jobs.commands.clear()
    assert study(name)[1]["rows"] == written["rows"]
    assert jobs.commands == [again]


def test_policy_row_is_over_its_seeds_and_network(study, jobs):
    jobs.rates = {"text-lstm-host-dense-1": 0.5, "text-lstm-1gbit-0us-auto-0": 1.2, "text-lstm-1gbit-0us-auto-1": 0.6}
    _, written, shown = study("policies", "--tasks", "text-lstm", "--seeds", "0,1")
    rows = {(row["bandwidth"], row["policy"]): row for row in written["rows"]}
    # Dense ends with 3 after 300 steps and has 3.03, the target, after 297; with seed 1 it ends with 4.5 and has 4.545
    # after (6 - 4.545) / 1.5 of its steps.
    dense, auto = rows["50mbit", "dense"], rows["1gbit", "auto"]
    assert dense["steps_to_quality"] == pytest.approx((297 + 291) / 2)
    assert dense["steps_to_quality_deviation"] == pytest.approx(3 * 2**0.5)
    assert dense["time_to_quality_s"] == pytest.approx(294 * (MEDIAN_S[SLOW] + CHOOSING_S))
    assert dense["summed_s"] == pytest.approx(294 * (1.5 * MEDIAN_S[SLOW] + CHOOSING_S))
    assert dense["quality_limit"] == pytest.approx(1.01 * (3.0 + 4.5) / 2)
    assert (dense["seeds"], dense["reached"], dense["shared"], dense["is_equal"]) == (2, 2, True, True)
    assert auto["of_dense"] == pytest.approx((297 / 1.2 + 291 / 1.2) / (297 + 291))
    assert auto["median_step_s"] == MEDIAN_S[FAST] + CHOOSING_S
    assert rows["1gbit", "static"]["reached"] == 1
    assert [row["policy"] for row in written["rows"]][3:] == ["auto", "dense", "static"]  # the best first
    assert "shared: dense, static do not look at the network" in shown


def test_steps_of_muon_are_timed_with_their_share_of_an_exchange(study, jobs, tmp_path):
    pytest.importorskip("matplotlib")
    jobs.rates["text-lstm-host-muon-0"] = 2.0
    more = ["--tasks", "text-lstm", "--policies", "auto,muon", "--seeds", "0", "--picture", str(tmp_path / "f.svg")]
    _, written, _ = study("policies", *more)
    [training] = [command for command in jobs.commands if "muon" in command]
    assert training[training.index("--exchange") + 1] == "muon"
    timing = next(command for command in jobs.commands if "bench" in command)
    words = dict(itertools.pairwise(timing))
    assert [name.partition(":")[0] for name in words["--exchange"].split(",")] == ["dense", "replay", "muon"]
    assert (words["--every"], words["--steps"], words["--warm-up"]) == ("10", "50", "10")
    muon = next(row for row in written["rows"] if row["policy"] == "muon")
    assert muon["of_dense"] == pytest.approx(0.5)
    picture = (tmp_path / "f-text-lstm.svg").read_text()
    assert all(f">{word}<" in picture for word in ("muon", "auto", "dense", "1gbit/s", "0us"))


def test_policies_name_failures_and_go_on(study, jobs):
    jobs.failing = {
        "text-lstm-host-static-0": "mpicomp: topk: too hot\n= BAD TERMINATION OF ONE OF YOUR PROCESSES\n",
        "text-lstm-host-dense-1": "ValueError: no\n",
    }
    status, written, shown = study("policies", "--tasks", "text-lstm", "--seeds", "0,1")
    rows = {row["policy"]: row for row in written["rows"]}
    assert (status, rows["auto"]["error"], rows["static"]["seeds"]) == (1, None, 1)
    assert rows["static"]["error"] == "seed 0: mpicomp: topk: too hot"
    assert (rows["auto"]["quality_limit"], rows["auto"]["time_to_quality_s"]) == (pytest.approx(3.03), None)
    assert "failed: text-lstm, one host, static, seed 0 (mpicomp: topk: too hot)" in shown
    jobs.failing = {}
    jobs.commands.clear()
    assert study("policies", "--tasks", "text-lstm", "--seeds", "0,1")[0] == 0
    timings = [f"text-lstm-{network}-timing-0" for network in ("50mbit-1ms", "1gbit-0us")]  # with the plans of static
    assert jobs.names == ["text-lstm-host-static-0", *timings, "text-lstm-host-dense-1"]


def test_runs_without_time_left_are_cut(jobs, capsys):
    assert call(importlib.import_module("policies"), [*WORDS["policies"], "--limit", "1e-9"]) == 0
    shown = capsys.readouterr().out
    assert jobs.commands == []
    assert "cut, since the time was over: digits, one host, dense, seed 0" in shown
    assert "6 of 6 runs were cut: the time was over" in shown


def test_hindsight_chooses_on_some_seeds_and_tests_others(study, jobs):
    jobs.rates["text-lstm-50mbit-1ms-auto-3"] = 0.993
    _, written, shown = study("hindsight")
    # topk1 is fastest and never good enough; with the second seed only what was near is trained.
    assert [name for name in jobs.names if "topk1" in name] == ["text-lstm-host-topk1-0"]
    assert "text-lstm-host-qsgd4-1" in jobs.names
    assert sorted(name[-1] for name in jobs.names if "-auto-" in name) == ["2", "2", "3", "3"]
    timings = [f"text-lstm-{place}-timing-{seed}" for seed in (0, 2) for place in ("50mbit-1ms", "1gbit-0us")]
    assert [name for name in jobs.names if "timing" in name] == timings
    slow = written["rows"][0]
    assert (slow["plan"], slow["dense"], slow["reached"], slow["error"]) == ("qsgd4", "dense-bf16", 2, None)

    def seconds(rate, step_s):  # to 1.01 times dense's last loss, 3, of a loss that falls from 6 by 3 times the rate
        return (6 - 3.03) / (3 * rate) * 300 * (step_s + CHOOSING_S)

    auto = [seconds(rate, MEDIAN_S[SLOW]) for rate in (0.999, 0.993)]
    best, dense = seconds(0.995, 0.5 * MEDIAN_S[SLOW]), seconds(1.0, 0.9 * MEDIAN_S[SLOW])
    assert (slow["auto_s"], slow["plan_s"], slow["dense_s"]) == pytest.approx((sum(auto) / 2, best, dense))
    assert slow["of_plan"] == pytest.approx(math.sqrt(auto[0] * auto[1]) / best)
    assert slow["of_dense"] == pytest.approx(math.sqrt(auto[0] * auto[1]) / dense)
    half = 12.706 * abs(math.log(auto[0] / auto[1])) / 2  # Student's t at 97.5 %, one degree of freedom, of a table
    assert slow["of_plan_high"] == pytest.approx(slow["of_plan"] * math.exp(half), rel=1e-4)
    assert slow["quality"] == pytest.approx(sum((6 - 3 * rate) / 3 - 1 for rate in (0.999, 0.993)) / 2)
    assert "qsgd4; dense-bf16" in shown


def walk(curve, target, lower):
    """Walk along a curve in hundredths of a step: smoothed over three, the best so far, linear between."""
    values = [value for _, value in curve]
    middle = [sum(values[place - 1 : place + 2]) / 3 for place in range(1, len(values) - 1)]
    smooth = [values[0], *middle, values[-1]]
    best = list(itertools.accumulate(smooth, min if lower else max))
    for tick in range(100 * curve[0][0], 100 * curve[-1][0] + 1):
        value = np.interp(tick / 100, [step for step, _ in curve], best)
        if value <= target if lower else value >= target:
            return tick / 100
    return None


@pytest.mark.parametrize("lower", [True, False])
def test_steps_to_quality_are_those_of_a_walk(lower):
    for seed in range(10):
        draw = random.Random(seed)
        steps = sorted(draw.sample(range(1, 60), draw.randint(2, 12)))
        curve = [(step, 3 + (-0.05 if lower else 0.05) * step + draw.uniform(-0.6, 0.6)) for step in steps]
        values = [value for _, value in curve]
        for _ in range(5):
            target = draw.uniform(min(values) - 0.2, max(values) + 0.2)
            found, expected = steps_to(curve, target, lower), walk(curve, target, lower)
            assert (found is None) == (expected is None)
            assert found is None or expected - 0.01 <= found <= expected + 1e-9


def test_steps_to_quality_of_values_that_are_not_finite():
    assert steps_to([(10, math.nan), (20, math.inf), (30, 2.0)], 2.5, True) == 30.0
    assert steps_to([(10, 2.0), (20, math.nan), (30, math.nan)], 1.0, True) is None
    assert mean_over_steps([(1, 1.0), (2, math.inf)]) is None
    assert mean_over_steps([(10, 4.0), (20, 2.0), (40, 2.0)]) == pytest.approx((10 * 3 + 20 * 2) / 30)


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("policies", ["--policies", "atuo"], "policies: --policies: unknown name 'atuo'; did you mean 'auto'?"),
        ("policies", ["--networks", "1gbit"], "lab: a network must be like 50mbit/1ms, got '1gbit'"),
        ("policies", ["--keep", "a,b"], "policies: --keep must be a folder without commas, got 'a,b'"),
        ("hindsight", ["--choose", "a"], "hindsight: --choose must be whole numbers such as 0,1,2, got 'a'"),
        ("estimators", ["--steps", "0"], "mpicomp: estimators: --steps must be an integer of at least 1, got 0\n"),
        ("estimators", ["--data", "norml"], "unknown name 'norml'; did you mean 'normal'?"),
        ("estimators", ["--gradients", "/nonexistent.npz"], "estimators: cannot read '/nonexistent.npz'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(name, words, text, jobs, capsys):
    assert call(importlib.import_module(name), words) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert (shown.out, jobs.commands) == ("", [])


PARENT = """
import os, signal, sys
from lab_jobs import execute
from comparison import terminated
from pathlib import Path
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
with terminated():
    execute([sys.executable, "-c", CHILD], os.environ, Path(sys.argv[1]), 60.0)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_signals_end_what_a_study_has_started(number, status, tmp_path):
    log, studies = tmp_path / "log", Path(lab_jobs.__file__).parent
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)], cwd=studies, stderr=subprocess.PIPE)
    while not (log.exists() and log.read_text().strip()):
        time.sleep(0.05)
    child = int(log.read_text())
    parent.send_signal(number)
    parent.communicate()
    assert parent.returncode == status
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
