"""The study of time to quality, on a stand-in for its trainings."""

import json

import pytest
import time_to_quality
from study_jobs import call
from time_to_quality import seconds_of_first, steps_to

RATES = {"dense": 1.0, "static": 0.5, "auto": 0.99}  # how fast an arm learns
STEP_S = {"dense": 1.0, "static": 0.25, "auto": 0.5}
STEPS = 100


@pytest.fixture
def trained(monkeypatch):
    """Have the study train nothing; return its trainings."""
    found = []

    def train(task, network, arm, seed, steps, hosts):
        found.append((task, network and str(network), arm, seed, steps))
        seconds = [STEP_S[arm] * (2 if network else 1)] * steps
        seconds[0] *= 11
        curve = [(step, 0.5 + 0.4 * RATES[arm] * step / steps) for step in range(5, steps + 1, 5)]
        row = {"curve": curve, "quality": curve[-1][1], "median_step_s": seconds[-1], "choosing_s": 0.0}
        return row | {"step_wire_bytes": 1e6, "seconds": seconds}

    monkeypatch.setattr(time_to_quality, "train", train)
    monkeypatch.setattr(time_to_quality.lab_jobs, "check_lab", lambda study: None)
    return found


def test_plans_train_on_one_host_and_policies_in_each_lab(trained, tmp_path, capsys):
    words = ["--tasks", "digits", "--arms", "static,auto", "--networks", "50mbit/1ms,1gbit/0us", "--seeds", "0,1"]
    words += ["--steps", str(STEPS), "--rows", str(tmp_path / "rows.jsonl")]
    assert [call(time_to_quality.STUDY, words) for _ in range(2)] == [0, 0]
    networks = ("50mbit/1ms", "1gbit/0us")
    expected = {("digits", None, arm, seed, STEPS) for arm in ("dense", "static") for seed in (0, 1)}
    expected |= {("digits", network, arm, 0, 24) for arm in ("dense", "static") for network in networks}
    expected |= {("digits", network, "auto", seed, STEPS) for seed in (0, 1) for network in networks}
    assert sorted(trained, key=str) == sorted(expected, key=str)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    first, *_ = lines = time_to_quality.table(rows)
    by_arm = {line["arm"]: line for line in lines if line["network"] == networks[0]}
    assert (first["arm"], first["reached"], by_arm["static"]["reached"]) == ("auto", 2, 0)
    assert by_arm["static"]["time_s"] is by_arm["static"]["of_dense"] is None
    assert by_arm["dense"]["of_dense"] == 1.0
    assert by_arm["auto"]["of_dense"] == pytest.approx(0.5 / 0.99, rel=0.02)
    assert by_arm["auto"]["summed_s"] == pytest.approx(by_arm["auto"]["time_s"] + 10 * STEP_S["auto"] * 2)
    assert (by_arm["auto"]["equal"], by_arm["static"]["equal"]) == (True, False)
    assert "of_dense" in capsys.readouterr().out


def test_a_curve_is_smoothed_and_its_best_counts():
    assert steps_to([(10, 0.5), (20, 0.8), (30, 0.7), (40, 0.9)], 0.9, lower=False) == 40
    assert steps_to([(10, 4.0), (20, float("nan")), (30, 2.0)], 2.5, lower=True) == 27.5
    assert steps_to([(10, 4.0), (20, 3.0)], 2.5, lower=True) is None
    assert seconds_of_first(0.0, [1.0]) == 0.0
