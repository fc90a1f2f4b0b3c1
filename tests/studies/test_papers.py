"""The tables of papers: what they compute from rows, and each study on the smallest grid, twice with the same rows."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import flexible_tables
import lgc_correlation
import numpy as np
import paper_runs
import pytest
import sidco_tables
import study_rows

from mpicomp.errors import MpicompError
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Round

PAPERS = Path(__file__).resolve().parents[2] / "studies" / "papers"


def test_rows_that_fail_or_come_late_are_named(tmp_path, capsys):
    arguments = argparse.Namespace(limit=1.0, rows=str(tmp_path / "rows.jsonl"))
    rows = study_rows.begin("test", arguments, ("name",))

    def fail():
        raise MpicompError("no such thing")

    rows.measure(("a",), lambda: {"value": 1})
    rows.measure(("b",), fail)
    rows.end = 0.0
    rows.measure(("c",), lambda: {"value": 2})
    [made] = rows.made
    assert made == {"name": "a", "value": 1} | rows.origin
    assert rows.late == ["b", "c"]
    assert "b: failed: no such thing" in capsys.readouterr().out
    assert study_rows.begin("test", arguments, ("name",)).find("a") == made


def test_simulated_clock_has_network_and_work_of_a_rank():
    def exchange(end):
        start = time.thread_time()
        while time.thread_time() < start + 0.02:
            pass
        yield Round("allgatherv", [1] * 2, np.dtype(np.uint8), send=np.zeros(1, np.uint8), recv=np.zeros(2, np.uint8))
        return end.clock()

    link = paper_runs.Link(1.0, 8.0)  # an allgather among two: a latency, and one byte
    world = LocalWorld(2, hosts=2, network=link)
    works = [paper_runs._ComputeClock(end) for end in world.transports]
    ends = world.run([each.counted(exchange(end)) for each, end in zip(works, world.transports, strict=True)])
    assert min(ends) >= 2.02
    assert world.transports[0].clock() == world.transports[0].seconds  # nothing passes between steps


def test_sidco_estimates_are_counts_over_those_asked_for():
    labels = ["topk", "sidco.gamma.published", "redsync.binary"]
    found = sidco_tables.select(sidco_tables.drawn("laplace", 4000), False, (0.1, 0.01), 3, labels)
    assert [(row["name"], row["ratio"]) for row in found] == [(name, ratio) for ratio in (0.1, 0.01) for name in labels]
    for row in found:
        assert 0 <= row["min"] <= row["mean"] <= row["max"]
        assert row["name"] != "topk" or row["min"] == row["max"] == 1


@pytest.mark.parametrize(
    ("name", "share"), [("laplace", 2**-0.5), ("gamma", 0.6 / 0.96**0.5), ("normal", (2 / np.pi) ** 0.5)]
)
def test_sidco_distributions_have_their_moments(name, share):
    magnitudes = np.abs(next(sidco_tables.drawn(name, 200_000)).astype(np.float64))
    assert magnitudes.mean() / np.sqrt((magnitudes**2).mean()) == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
def test_lgc_correlation_of_normals_is_theirs(rho):
    """Of correlated normals the information is -log(1 - rho^2) / 2 nats, of which 16 bins show nearly all."""
    size, rng = 100_000, np.random.default_rng(0)
    one, noise = rng.standard_normal((2, size))
    other = rho * one + np.sqrt(1 - rho**2) * noise
    assert lgc_correlation.correlation(one, other) == pytest.approx(rho, abs=0.02)
    found, entropy = lgc_correlation.information(lgc_correlation.bins_of(one), lgc_correlation.bins_of(other))
    assert found == pytest.approx(-np.log(1 - rho**2) / 2, rel=0.1, abs=0.002)
    assert entropy == pytest.approx(np.log(16), abs=1e-4)


def test_lgc_correlation_has_one_bin_for_zeros():
    array = np.r_[np.zeros(5000), np.arange(1.0, 1001)]
    assert len(set(lgc_correlation.bins_of(array)[:5000])) == 1
    assert lgc_correlation.correlation(array, np.ones(6000)) == 0


def twice(name, words, folder, count):
    """Run a study twice as a script; return its rows and what it printed. The second run makes no row."""
    path = folder / "rows.jsonl"
    for _ in range(2):
        command = [sys.executable, PAPERS / f"{name}.py", *words, "--rows", path]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, check=False, timeout=280, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "not measured" not in done.stdout
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == count
    return rows, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "words", "count", "printed"),
    [
        ("lgc_correlation", "--ranks 2 --steps 2 --every 2", 1, "all"),
        ("lgc_tables", "--tasks digits --ranks 2 --steps 18 --arms", 2, "top-k;ring as published"),
        ("gravac_tables", "--tasks digits --ranks 2 --steps 12 --arms", 6, "dense;top-k 10x;GraVAC here"),
        ("lgreco_tables", "--tasks digits --ranks 2 --families QSGD --steps 48 --arms", 3, "uniform;here, alpha 4"),
        # How long a step computes, and five exchanges with each of two seeds
        ("sidco_tables", "--data laplace --estimates 2 --tasks digits --seeds 0,1 --steps 4 --ranks 2", 12, "redsync"),
    ],
)
def test_papers_tables_resume_from_rows(name, words, count, printed, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    words = words.split() + ([printed] if words.endswith("--arms") else [])
    rows, output = twice(name, words, tmp_path, count)
    assert all(word in output for word in printed.split(";"))
    if name == "lgreco_tables":
        sizes = {row["arm"]: row["late_bytes"] for row in rows}
        assert sizes["here, alpha 4"] < sizes["uniform"] < sizes[""]
    if name == "sidco_tables":
        [probe] = [row for row in rows if row["table"] == "probe"]
        least = probe["compute_s"] / (1 - sidco_tables._SHARE)  # a dense step is nearly all communication
        assert all(row["step_s"] >= 0.99 * least for row in rows if row["name"] == "dense" and row["table"] == "train")


@pytest.fixture
def images():
    for name in ("torch", "sklearn", "mlxtend"):
        pytest.importorskip(name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flexible_schedule_has_all_steps_and_trials(images):
    pytest.importorskip("pymoo")
    fixed = flexible_tables.train("C1", "top-k 0.01 by allgather", 50, 2)["phases"]
    assert [phase["ran"]["allgather"] for phase in fixed.values()] == [12, 12, 12, 14]
    assert fixed["50 ms, 25 Gbit/s"]["seconds"] >= 14 * 0.06  # a latency, 10 ms of computing, and ranks' work
    phases = flexible_tables.train("C1", "as published", 50, 2)["phases"].values()
    assert sum(sum(phase["ran"].values()) for phase in phases) == 50
    assert sum(phase["trials"] for phase in phases) >= 50  # five candidates of ten steps
