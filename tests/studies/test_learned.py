"""What is run to compare learned codes, and what the table says of it."""

import itertools
import json
import statistics
from pathlib import Path

import learned
import numpy as np
import pytest
from comparison import Training, unfinished
from learned_bytes import coded_bytes
from learned_runs import EXCHANGES, GOALS, PHASES, Runner, runs_of, words_of
from learned_table import Table
from mpicomp.bench.measure.jobs import CUT, DONE, FAILED
from no_processes import stand_in
from study_words import call
from tables import check_types, documented

import mpicomp
from mpicomp import LGC
from mpicomp.transport import LocalWorld

LEARNT = sum(PHASES)
STEPS = LEARNT + 30
LAYERS = [("last.weight", 100), ("middle.weight", 20_000), ("middle.bias", 80), ("first.weight", 20)]
"""The first one has less than a hundredth of the parameters and travels dense; of the last one no values are coded."""
QUALITY = {"dense": 0.95, "topk": 0.94, "lgc-ring": 0.93, "lgc-linear": 0.94}
ONCE = {"lgc-ring": 5000, "lgc-linear": 1000}


def quality_of(exchange, seed):
    return QUALITY.get(exchange, 0.9) + 0.01 * seed


def line_of(exchange, config, collective, step):
    coded = exchange.startswith("lgc") and step >= 10
    late = step >= LEARNT
    error = (0.9 - 0.001 * step if not late else 0.25) if coded else None
    layers = [{"name": name, "numel": numel, "ratio": 0.05, "gain": None} for name, numel in LAYERS]
    bucket = {"compressor": config, "collective": collective, "layers": layers, "code_error": error}
    phases = {"compress": 0.003 if late else 0.5, "decode": 0.001 * (1 + step % 3 // 2), "exchange": 9.0}
    wire, sent = (1000 + step, 500) if late else (10**6, 10**6)
    return {
        "step": step,
        "seconds": 0.02 + 0.01 * (step % 3),
        "wire_bytes": wire,
        "sent_bytes": sent,
        "phases_s": phases,
        "buckets": [bucket],
    }


class Jobs:
    """Stands in for processes: writes what `mpicomp train` would, and remembers what it was told."""

    def __init__(self):
        self.commands = []
        self.failing = {}

    def __call__(self, command, environment, log, limit_s):
        self.commands.append(command)
        words = dict(itertools.pairwise(command))
        name = Path(words["--json"]).stem
        log.write_text("begin\n" + self.failing.get(name, ""))
        if name in self.failing:
            return 3
        exchange = name.removeprefix(f"{words['--task']}-host-").removesuffix(f"-{words['--seed']}")
        config = mpicomp.get_compressor(json.loads(words["--compressor"])).get_config()
        steps = int(words["--steps"])
        lines = [line_of(exchange, config, words["--collective"], step) for step in range(steps)]
        Path(words["--metrics"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        common = {"correlation": 0.25, "information": 0.5, "control": 0.1, "entropy": 2.0}
        common |= {"share": 0.25, "control_share": 0.05}
        outcome = {
            "steps": steps,
            "quality": {"value": quality_of(exchange, int(words["--seed"]))},
            "compressor_config": config,
            "once_bytes": 700 + ONCE.get(exchange, 0),
            "correlation": {"every": 5, "looks": 2, "bins": 16, "whole": common, "layers": []},
        }
        Path(words["--json"]).write_text(json.dumps(outcome))
        return 0


@pytest.fixture
def jobs(monkeypatch):
    return stand_in(monkeypatch, Jobs())


def all_of(folder, exchanges=("dense", "topk", "lgc-ring"), seeds=(0, 1), steps=STEPS, left_s=1e6):
    runner = Runner(folder, 4, steps)
    for run in runs_of(exchanges, {"digits": list(seeds)}):
        runner.run(run, left_s)
    return runner


# What is run

LATE = {"ratio": 0.05, "dense_steps": 20, "training_steps": 60}


def test_every_run_is_there_once_and_a_seed_comes_after_the_other():
    runs = runs_of(["dense", "lgc-ring"], {"digits": [0, 1, 2], "text-lstm": [0, 1]})
    assert len({run.name for run in runs}) == len(runs) == 2 * (3 + 2)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert [str(run) for run in runs[:4]] == [
        "digits, one host, dense, seed 0",
        "digits, one host, lgc-ring, seed 0",
        "text-lstm, one host, dense, seed 0",
        "text-lstm, one host, lgc-ring, seed 0",
    ]


@pytest.mark.parametrize(
    ("exchange", "config", "collective"),
    [
        ("dense", {"id": "dense"}, "allreduce"),
        ("topk", {"id": "topk", "ratio": 0.05}, "allgather"),
        ("star-topk", {"id": "topk", "ratio": 0.05}, "star-topk"),
        ("lgc-ring", {"id": "lgc"} | LATE, "learned"),
        ("lgc-server-selected", {"id": "lgc", "instance": "server", "error": "selected"} | LATE, "learned"),
        ("lgc-linear", {"id": "lgc", "code": "linear"} | LATE, "learned"),
    ],
)
def test_words_for_trainings(exchange, config, collective):
    words = dict(itertools.pairwise(words_of(Training("digits", exchange, 3), 900, (20, 60))))
    assert json.loads(words["--compressor"]) == config
    assert (words["--collective"], words["--seed"], words["--steps"]) == (collective, "3", "900")
    assert words["--correlation"] == "45"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_is_named_can_be_bound(exchange):
    words = dict(itertools.pairwise(words_of(Training("text-lstm", exchange, 0), 900)))
    from mpicomp.collectives import bind

    bind(mpicomp.get_compressor(json.loads(words["--compressor"])), words["--collective"])


def test_codes_travel_in_most_of_a_run():
    """So the default phases fit a run of 900 steps."""
    assert LEARNT <= 300


# What the table says


def test_a_row_sums_up_its_seeds(jobs, tmp_path):
    runner = all_of(tmp_path)
    rows = {row["exchange"]: row for row in Table(runner).rows()}
    assert list(rows) == ["dense", "topk", "lgc-ring"]
    row = rows["lgc-ring"]
    assert (row["task"], row["ratio"], row["ranks"], row["steps"], row["seeds"]) == ("digits", 0.05, 4, STEPS, 2)
    assert row["quality"] == pytest.approx((0.93 + 0.94) / 2)
    assert row["quality_deviation"] == pytest.approx(statistics.stdev([0.93, 0.94]))
    assert row["difference"] == pytest.approx(-0.02)
    assert row["difference_deviation"] == pytest.approx(0, abs=1e-12)
    assert row["is_within"] is False  # by 0.02, and 0.015 are allowed
    assert rows["topk"]["is_within"] is True
    late = range(LEARNT, STEPS)
    assert row["wire_bytes"] == pytest.approx(statistics.mean(1000 + step for step in late))
    assert row["sent_bytes"] == 500
    assert row["kernels_s"] == pytest.approx(statistics.median(0.003 + 0.001 * (1 + step % 3 // 2) for step in late))
    assert row["step_s"] == pytest.approx(statistics.median(0.02 + 0.01 * (step % 3) for step in late))
    learning = [0.9 - 0.001 * step for step in range(10, LEARNT)]
    tenth = len(learning) // 10
    assert row["error_first"] == pytest.approx(statistics.mean(learning[:tenth]))
    assert row["error_last"] == pytest.approx(statistics.mean(learning[-tenth:]))
    assert row["code_error"] == pytest.approx(0.25)
    assert (row["once_bytes"], rows["dense"]["once_bytes"]) == (5000, 0)
    assert (row["correlation"], row["share"], row["control_share"]) == (0.25, 0.25, 0.05)
    assert row["error"] is None
    for name in ("error_first", "error_last", "code_error"):
        assert rows["topk"][name] is None


def test_layers_that_a_code_covers_are_counted_for_all_alike(jobs, tmp_path):
    rows = {row["exchange"]: row for row in Table(all_of(tmp_path)).rows()}
    assert [row["coded_numel"] for row in rows.values()] == [20_080] * 3
    dense, topk, ring = rows.values()
    assert dense["coded_sent_bytes"] == pytest.approx(4 * 20_080, abs=64)  # flags and a norm ride along
    assert dense["coded_wire_bytes"] == pytest.approx(2 * 3 / 4 * 4 * 20_080, abs=128)
    assert topk["coded_wire_bytes"] == pytest.approx(3 * topk["coded_sent_bytes"])
    for name, base in (("sent", "sent"), ("least", "sent"), ("wire", "wire")):
        expected = topk[f"coded_{base}_bytes"] / ring[f"coded_{name}_bytes"]
        assert ring[f"{name}_fewer"] == pytest.approx(expected)
    assert (topk["sent_fewer"], topk["wire_fewer"]) == (1.0, 1.0)


def test_shorter_phases_are_longer_codes(jobs, tmp_path):
    runner = Runner(tmp_path, 4, STEPS, (10, 20))
    run = Training("digits", "lgc-ring", 0)
    late = [line for line in (line_of("lgc-ring", {}, "", step) for step in range(STEPS)) if line["step"] >= 30]
    assert runner.run(run, 1e6).late["wire_bytes"] == statistics.mean(line["wire_bytes"] for line in late)
    assert '"dense_steps": 10, "training_steps": 20' in " ".join(jobs.commands[0])
    assert "from step 30 on" in " ".join(Table(runner).explained(Table(runner).rows()))


def test_without_dense_or_topk_there_is_nothing_to_compare_with(jobs, tmp_path):
    jobs.failing["digits-host-dense-0"] = "mpicomp: lgc: no\n"
    runner = all_of(tmp_path, exchanges=["dense", "lgc-ring"], seeds=[0])
    dense, ring = Table(runner).rows()
    assert (dense["seeds"], dense["quality"], dense["error"]) == (0, None, "seed 0: mpicomp: lgc: no")
    assert ring["quality"] == pytest.approx(0.93)
    assert [ring[name] for name in ("difference", "is_within", "once_bytes", "sent_fewer")] == [None] * 4
    cells = Table(runner).cells(dense)
    assert cells["problem"] == "seed 0: mpicomp: lgc: no"
    assert cells["quality"] == cells["coded_kB"] == "-"
    assert runner.finished[Training("digits", "dense", 0)].status == FAILED


def test_what_has_no_time_left_is_cut(jobs, tmp_path):
    runner = all_of(tmp_path, seeds=[0], left_s=0.0)
    assert {own.status for own in runner.finished.values()} == {CUT}
    rows = Table(runner).rows()
    assert rows[0]["error"] == "1 of 1 runs were cut: the time was over"
    (line,) = unfinished(runner.finished.values())
    assert line.startswith("cut, since the time was over: digits, one host, dense, seed 0")


def test_what_is_complete_is_not_run_again(jobs, tmp_path):
    first = all_of(tmp_path)
    jobs.commands.clear()
    torn = tmp_path / "digits-host-topk-1.jsonl"
    torn.write_text(torn.read_text()[:-30])
    second = all_of(tmp_path)
    assert [Path(command[-1]).stem for command in jobs.commands] == ["digits-host-topk-1"]
    assert {own.status for own in second.finished.values()} == {DONE}
    assert Table(second).rows() == Table(first).rows()


# Bytes of the layers that a code covers


def buckets_of(config, collective, layers=LAYERS):
    own = [{"name": name, "numel": numel, "ratio": 0.1, "gain": None} for name, numel in layers]
    return [{"compressor": mpicomp.get_compressor(config).get_config(), "collective": collective, "layers": own}]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_of_plain_pairs(ranks):
    """By hand: headers come with the message, and all ranks pass on what others sent."""
    found = coded_bytes(
        buckets_of({"id": "topk", "ratio": 0.05, "indices": "plain"}, "allgather"), LGC(ratio=0.05), ranks, LEARNT + 1
    )
    pairs = 8 * 1004
    assert found["coded_numel"] == 20_080
    assert pairs <= found["coded_sent_bytes"] <= pairs + 64
    assert found["coded_least_bytes"] == found["coded_sent_bytes"]
    assert found["coded_wire_bytes"] == pytest.approx((ranks - 1) * found["coded_sent_bytes"])


@pytest.mark.parametrize("instance", ["ring", "server"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_of_codes_are_those_that_a_model_of_these_layers_sends(ranks, instance):
    config = {"id": "lgc", "ratio": 0.05, "instance": instance, "code": "linear"}
    found = coded_bytes(buckets_of(config, "learned"), LGC(ratio=0.05), ranks, LEARNT + 1)
    phases = {"dense_steps": 1, "training_steps": 2}
    world = LocalWorld(ranks)
    compressor = mpicomp.get_compressor(config | phases)
    reducers = [mpicomp.Reducer(compressor, "learned", comm=end) for end in world.transports]
    rng, sent, wire = np.random.default_rng(0), [], []
    for _ in range(5):
        gradients = [
            {name: rng.standard_normal(numel).astype(np.float32) for name, numel in LAYERS[1:3]} for _ in range(ranks)
        ]
        world.run([own.rounds(own_gradients) for own, own_gradients in zip(reducers, gradients, strict=True)])
        records = [own.last_step.buckets[0] for own in reducers]
        sent.append([own.sent_bytes for own in records])
        wire.append([own.wire_bytes for own in records])
    assert found["coded_sent_bytes"] == pytest.approx(np.mean(sent[-1]))
    assert found["coded_least_bytes"] == min(sent[-1])
    assert found["coded_wire_bytes"] == pytest.approx(np.mean(wire[-1]))
    assert found["coded_sent_bytes"] < np.mean(sent[1])  # when values travelled as they are


# The command


def test_the_table_from_one_command(jobs, tmp_path, capsys):
    path = tmp_path / "rows.json"
    words = ["--tasks", "digits", "--exchanges", "topk,lgc-ring,lgc-linear", "--steps", str(STEPS), "--json", str(path)]
    assert call(learned, [*words, "--keep", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert f"{4 * len(GOALS['digits'].seeds)} runs, 4 ranks, {STEPS} steps" in shown
    lines = shown[shown.index("digits, 4 ranks, ratio 0.05") :].splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["exchange", "dense", "topk", "lgc-ring", "lgc-linear"]
    written = json.loads(path.read_text())
    assert list(written) == ["schema", "environment", "rows", "runs"]
    assert (len(written["rows"]), len(written["runs"])) == (4, 20)
    assert str(tmp_path) not in path.read_text()
    for name in ("rows", "runs"):
        fields = documented("studies.md", f"{name.capitalize()} of learned codes")
        for own in written[name]:
            assert list(own) == list(fields)
            check_types(own, fields)


def test_one_that_fails_is_told_and_the_rest_goes_on(jobs, tmp_path, capsys):
    jobs.failing["digits-host-lgc-ring-1"] = "mpicomp: lgc: a reason\n"
    words = ["--tasks", "digits", "--exchanges", "topk,lgc-ring", "--seeds", "0,1", "--steps", str(STEPS)]
    assert call(learned, [*words]) == 1
    shown = capsys.readouterr().out
    assert "failed: digits, one host, lgc-ring, seed 1 (mpicomp: lgc: a reason)" in shown
    assert "seed 1: mpicomp: lgc: a reason" in shown


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--exchanges", "lgc-rin"], "did you mean 'lgc-ring'"),
        (["--exchanges", ","], "--exchanges names nothing"),
        (["--tasks", "vgg"], "vgg"),
        (["--steps", str(LEARNT)], f"--steps must be more than {LEARNT}, before which no code travels"),
        (["--phases", "50"], "--phases must be two whole numbers such as 50,150, got '50'"),
        (["--phases", "50,0"], "--phases must be at least 1, got 0"),
        (["--phases", "10,20", "--steps", "30"], "--steps must be more than 30"),
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
        (["--seeds", "one"], "--seeds must be whole numbers"),
        (["--limit", "0"], "--limit must be minutes above 0"),
        (["--json", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(jobs, capsys, words, text):
    assert call(learned, [*words]) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.out == ""
    assert jobs.commands == []


def test_every_goal_agrees_with_its_task():
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from mpicomp.bench.tasks.digits import Digits
    from mpicomp.bench.tasks.text import TextLSTM

    for task in (Digits, TextLSTM):
        assert task.better == ("lower" if GOALS[task.name].lower else "higher")


def test_a_verdict_is_of_what_a_run_comes_to():
    """A code travels late in a run; what came before would be counted for it, or against it."""
    pytest.importorskip("torch")
    from mpicomp.bench.train import Settings

    from mpicomp.policies import get_policy

    changes = {
        name: Settings(compressor, "auto", get_policy(policy), 300, 0).changes
        for name, compressor, policy in [
            ("topk", mpicomp.TopK(), "static"),
            ("lgc", LGC(), "static"),
            ("auto", None, "auto"),
        ]
    }
    assert changes == {"topk": False, "lgc": True, "auto": True}
