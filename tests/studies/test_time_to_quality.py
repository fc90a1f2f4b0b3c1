"""The study of time to quality, on a stand-in for its trainings."""

import json
from pathlib import Path

import pytest
import study_rows
import time_to_quality
from study_jobs import call
from time_to_quality import seconds_of_first, steps_to

RATES = {"dense": 1.0, "dense-bf16": 0.98, "static": 0.5, "auto": 0.99}  # how fast an arm learns
STEP_S = {"dense": 1.0, "dense-bf16": 0.6, "static": 0.25, "auto": 0.5, "ddp-fp16": 0.8}
STEPS = 100
ROWS = Path(__file__).resolve().parents[2] / "docs" / "time_to_quality.jsonl"
README = ROWS.parents[1] / "README.md"
RESULTS = README.parent / "docs" / "results.md"


@pytest.fixture
def trained(monkeypatch):
    """Have the study train nothing; return its trainings."""
    found = []

    def train(task, network, arm, seed, steps, hosts):
        found.append((task, network and str(network), arm, seed, steps))
        seconds = [STEP_S[arm] * (2 if network else 1)] * steps
        seconds[0] *= 11
        curve = [(step, 0.5 + 0.4 * RATES[arm] * step / steps) for step in range(5, steps + 1, 5)]
        return seconds_row(seconds[-1]) | {"curve": curve, "quality": curve[-1][1], "seconds": seconds}

    def seconds_row(step_s):
        ends = {"step_s": step_s, "step_low_s": 0.9 * step_s, "step_high_s": 1.1 * step_s}
        return ends | {"choosing_s": 0.0, "step_wire_bytes": 1e6, "seconds": []}

    def time_peer(task, network, arm, steps, hosts):
        found.append((task, str(network), arm, None, steps))
        return seconds_row(2 * STEP_S[arm])

    monkeypatch.setattr(time_to_quality, "time_peer", time_peer)
    monkeypatch.setattr(study_rows, "commit", lambda: "abc")
    monkeypatch.setattr(study_rows, "copy_speed", lambda: 9.5)
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
    assert {(row["commit"], row["copy_gb_s"]) for row in rows} == {("abc", 9.5)}
    assert by_arm["auto"]["summed_s"] == pytest.approx(by_arm["auto"]["time_s"] + 10 * STEP_S["auto"] * 2)
    assert (by_arm["auto"]["equal"], by_arm["static"]["equal"]) == (True, False)
    assert "of_dense" in capsys.readouterr().out


def test_ratios_are_over_the_faster_dense_and_ddp_learns_what_dense_learns(trained, tmp_path):
    words = ["--tasks", "digits", "--arms", "dense-bf16,ddp-fp16", "--networks", "1gbit/0us", "--seeds", "0,1"]
    path = tmp_path / "rows.jsonl"
    assert call(time_to_quality.STUDY, [*words, "--steps", str(STEPS), "--rows", str(path)]) == 0
    lines = time_to_quality.table([json.loads(line) for line in path.read_text().splitlines()])
    by_arm = {line["arm"]: line for line in lines}
    assert by_arm["dense-bf16"]["of_dense"] == 1.0
    assert by_arm["ddp-fp16"]["steps"] == by_arm["dense"]["steps"]
    assert by_arm["ddp-fp16"]["of_dense"] == pytest.approx(0.8 * by_arm["dense"]["of_dense"])
    assert by_arm["ddp-fp16"]["least"] == by_arm["ddp-fp16"]["most"] == by_arm["ddp-fp16"]["of_dense"]


def test_rows_of_two_commits_are_not_mixed(trained, tmp_path, monkeypatch, capsys):
    words = ["--tasks", "digits", "--arms", "dense", "--networks", "1gbit/0us", "--steps", "40"]
    words += ["--rows", str(tmp_path / "rows.jsonl"), "--seeds"]
    assert call(time_to_quality.STUDY, [*words, "0"]) == 0
    monkeypatch.setattr(study_rows, "commit", lambda: "def")
    assert call(time_to_quality.STUDY, [*words, "0"]) == 0  # all are there: nothing is added
    assert call(time_to_quality.STUDY, [*words, "0,1"]) == 2
    assert "its rows are of commit abc and this is def, so no row is added" in capsys.readouterr().err


def test_pages_have_the_numbers_of_the_rows(trained, tmp_path, monkeypatch):
    page, path = tmp_path / "README.md", tmp_path / "rows.jsonl"
    page.write_text("# a\n<!-- measured: tour -->\n58\n<!-- end -->\nb\n<!-- measured: text-gpt -->\n<!-- end -->\n")
    printed = ["Seconds to a loss of 5", "dense ###  9.5", "auto  #    3.1"]
    monkeypatch.setattr(time_to_quality, "take_tour", lambda: {"printed": printed})
    words = ["--tasks", "text-gpt,tour", "--arms", "dense-bf16,static,auto", "--steps", str(STEPS), "--seeds", "0,1"]
    words += ["--networks", "50mbit/1ms,1gbit/0us", "--rows", str(path), "--pages", str(page)]
    picture = tmp_path / "four.svg"
    assert call(time_to_quality.STUDY, [*words, "--picture", str(picture)]) == 0
    written = page.read_text()
    assert "time to quality, of dense" in picture.read_text()
    assert "dense ###  9.5\nauto  #    3.1\n```\n<!-- end -->\nb" in written
    assert "| exchange | 50 Mbit/s, 1 ms | 1 Gbit/s | MB a step | loss |" in written
    assert "Commit `abc`" in written
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert time_to_quality.filled(written, time_to_quality.parts_of_pages(rows)) == written
    next(row for row in rows if row["task"] == "tour")["printed"][1] = "dense ###  9.4"
    assert time_to_quality.filled(written, time_to_quality.parts_of_pages(rows)) != written


@pytest.mark.parametrize("path", [README, RESULTS], ids=lambda path: path.name)
def test_pages_have_the_numbers_of_the_rows_in_the_repository(path):
    if not ROWS.exists():
        pytest.skip("not measured: python studies/time_to_quality.py --rows docs/time_to_quality.jsonl")
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    page = path.read_text()
    assert page.count("<!-- measured: ") == 2
    assert time_to_quality.filled(page, time_to_quality.parts_of_pages(rows)) == page
    assert not any(row["commit"].endswith("+") for row in rows)  # rows of what is committed
    assert all(row["cores"] and row["copy_gb_s"] for row in rows)


def test_a_curve_is_smoothed_and_its_best_counts():
    assert steps_to([(10, 0.5), (20, 0.8), (30, 0.7), (40, 0.9)], 0.9, lower=False) == 40
    assert steps_to([(10, 4.0), (20, float("nan")), (30, 2.0)], 2.5, lower=True) == 27.5
    assert steps_to([(10, 4.0), (20, 3.0)], 2.5, lower=True) is None
    assert seconds_of_first(0.0, [1.0]) == 0.0
