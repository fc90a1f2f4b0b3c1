"""What is run to compare policies, in which order, and what the table says of it."""

import itertools
import json
import math
import random
import sys
import time
from pathlib import Path

import pytest
from mpicomp.bench.jobs import CUT, DONE, FAILED, execute, last_words
from mpicomp.bench.networks import Network
from mpicomp.bench.policies import (
    ARMS,
    BLOCKS,
    GOALS,
    LONGEST_BLOCK,
    SHORTEST_BLOCK,
    Timing,
    Training,
    runs_of,
    words_of_timing,
    words_of_training,
)
from mpicomp.bench.policy_runs import Runner
from mpicomp.bench.policy_table import (
    cells_of,
    explained,
    mean_over_steps,
    rows_of,
    smoothed,
    steps_to,
)
from tables import check_types, documented

from mpicomp.cli import main

SLOW, FAST = Network("50mbit", "1ms"), Network("1gbit", "0us")
STEPS = {"digits": 200, "text-lstm": 300}
RATE = {"dense": 1.0, "static": 0.9, "auto": 0.95, "gravac": 0.8}  # how fast a policy learns
MEDIAN_S = {None: 0.1, SLOW: 2.0, FAST: 0.5}
CHOOSING_S = 0.125


class Jobs:
    """Stands in for processes: writes what `mpicomp` would, and remembers what it was told."""

    def __init__(self):
        self.commands = []
        self.failing = {}
        self.endless = set()
        self.rates = {}  # of runner by name, where they are not those of their policy

    def __call__(self, command, environment, log, limit_s):
        self.commands.append(command)
        words = dict(itertools.pairwise(command))
        name = Path(words["--json"]).stem
        if name in self.endless:
            return None
        log.write_text("begin\n" + self.failing.get(name, ""))
        if name in self.failing:
            return 3
        network = Network(words["--bandwidth"], words["--latency"]) if "lab" in command else None
        write = self.time if "bench" in command else self.train
        Path(words["--json"]).write_text(json.dumps(write(words, name, MEDIAN_S.get(network, 1.0))))
        return 0

    def train(self, words, name, median_s):
        task, policy = words["--task"], name.split("-")[-2]
        rate = self.rates.get(name, RATE[policy])
        steps, every = int(words.get("--steps", STEPS[task])), int(words["--evaluate-every"])
        lines = []
        for step in range(steps):
            quality = quality_of(task, rate, step + 1, steps) if (step + 1) % every == 0 else None
            lines.append({"step": step, "quality": quality})
        Path(words["--metrics"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = {"steps": steps, "median_step_s": median_s, "wire_bytes": 1_000_000 * steps, "choosing_s": CHOOSING_S}
        return found | {"quality": {"value": quality_of(task, rate, steps, steps)}}

    def time(self, words, name, median_s):
        seconds = {"median_s": median_s, "low_s": None, "high_s": None, "mean_s": 1.5 * median_s}
        rows = []
        for exchange in words["--exchange"].split(","):
            if exchange != "dense":
                assert Path(exchange.removeprefix("replay:")).read_text()
            rows.append({"exchange": exchange, "ran": "topk allgather", "steps": int(words["--steps"]), **seconds})
        return {"rows": rows}


def quality_of(task, rate, step, steps):
    """A loss that falls along a line, or an accuracy that rises along one."""
    share = rate * step / steps
    return 6 - 3 * share if task == "text-lstm" else 0.5 + 0.4 * share


@pytest.fixture
def jobs(monkeypatch):
    found = Jobs()
    monkeypatch.setattr("mpicomp.bench.jobs.execute", found)
    monkeypatch.setattr("mpicomp.bench.jobs.find_launcher", lambda: Path("/bin/mpiexec"))
    monkeypatch.setattr("mpicomp.bench.jobs.find_mpi", lambda launcher: "mpich")
    monkeypatch.setattr("mpicomp.bench.networks.check_lab", lambda command: None)
    monkeypatch.setattr("mpicomp.cli.runs.check_tasks", lambda command: None)
    return found


def all_of(folder, policies=("dense", "static", "auto"), networks=(SLOW, FAST), seeds=(0, 1), steps=None, left_s=1e6):
    runner = Runner(folder, 4, steps)
    for run in runs_of(policies, networks, {"text-lstm": list(seeds)}):
        runner.run(run, left_s)
    return runner


def names_of(jobs):
    return [Path(command[command.index("--json") + 1]).stem for command in jobs.commands]


# Steps to quality


def slowly(curve, target, lower):
    """Walk along the curve in hundredths of a step."""
    smooth = []
    for place, (_, value) in enumerate(curve):
        if place in (0, len(curve) - 1):
            smooth.append(value)
        else:
            smooth.append(sum(other for _, other in curve[place - 1 : place + 2]) / 3)
    best = [min(smooth[: place + 1]) if lower else max(smooth[: place + 1]) for place in range(len(curve))]
    for tick in range(100 * curve[0][0], 100 * curve[-1][0] + 1):
        step = tick / 100
        for place in range(len(curve) - 1):
            left, right = curve[place][0], curve[place + 1][0]
            if left <= step <= right:
                value = best[place] + (best[place + 1] - best[place]) * (step - left) / (right - left)
                if value <= target if lower else value >= target:
                    return step
    return None


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_steps_are_those_of_a_walk_along_the_curve(seed, lower):
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, 60), draw.randint(2, 12)))
    drift = -0.05 if lower else 0.05
    curve = [(step, 3 + drift * step + draw.uniform(-0.6, 0.6)) for step in steps]
    values = [value for _, value in curve]
    for _ in range(5):
        target = draw.uniform(min(values) - 0.2, max(values) + 0.2)
        found, expected = steps_to(curve, target, lower), slowly(curve, target, lower)
        assert (found is None) == (expected is None)
        if found is not None:
            assert expected - 0.01 <= found <= expected + 1e-9


@pytest.mark.parametrize(
    ("curve", "target", "lower", "steps"),
    [
        ([(10, 4.0), (20, 3.0), (30, 2.0)], 3.0, True, 20.0),
        ([(10, 4.0), (20, 3.0), (30, 2.0)], 2.0, True, 30.0),
        ([(10, 4.0), (20, 3.0), (30, 2.0)], 1.99, True, None),
        ([(10, 4.0), (20, 3.0), (30, 2.0)], 5.0, True, 10.0),  # what was before is not known
        ([(10, 0.2), (20, 0.4), (30, 0.9)], 0.7, False, 25.0),  # smoothed 0.2, 0.5, 0.9
        ([(10, 3.0), (20, 9.0), (30, 3.0), (40, 1.0)], 2.0, True, 35.0),  # smoothed 3, 5, 13/3, 1: best 3, 3, 3, 1
        ([(10, math.nan), (20, math.inf), (30, 2.0)], 2.5, True, 30.0),
        ([(10, 2.0), (20, math.nan), (30, math.nan)], 1.0, True, None),
        ([(10, 0.3)], 0.5, False, None),
        ([(10, 0.5)], 0.5, False, 10.0),
    ],
)
def test_steps_of_curves_made_by_hand(curve, target, lower, steps):
    found = steps_to(curve, target, lower)
    assert found == (None if steps is None else pytest.approx(steps))


def test_the_last_value_alone_decides_whether_it_is_reached_in_the_end():
    assert smoothed([5.0, 4.0, 3.3])[-1] == 3.3
    assert steps_to([(1, 5.0), (2, 4.0), (3, 3.3)], 3.3, lower=True) == 3.0


def test_the_area_under_the_curve_is_over_steps():
    assert mean_over_steps([(10, 4.0), (20, 2.0), (40, 2.0)]) == pytest.approx((10 * 3 + 20 * 2) / 30)
    assert mean_over_steps([(7, 1.5)]) == 1.5
    assert mean_over_steps([(1, 1.0), (2, math.inf)]) is None


# What is run


def test_every_run_is_there_once_and_steps_are_timed_when_there_are_plans():
    policies = ["dense", "static", "gravac", "auto"]
    runs = runs_of(policies, [SLOW, FAST], {"digits": [0, 1, 2], "text-lstm": [0, 1]})
    assert len(set(runs)) == len(runs)
    assert len({run.name for run in runs}) == len(runs)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for task, seeds in {"digits": [0, 1, 2], "text-lstm": [0, 1]}.items():
        for seed in seeds:
            expected = [Training(task, "dense", seed, None), Training(task, "static", seed, None)]
            for network in (SLOW, FAST):
                expected += [Training(task, "gravac", seed, network), Training(task, "auto", seed, network)]
                if seed == 0:
                    expected.append(Timing(task, tuple(policies), 0, network))
                    assert set(expected[-1].sources) <= set(expected)
                    assert [own.policy for own in expected[-1].sources] == policies
            assert [run for run in runs if run.task == task and run.seed == seed] == expected
            places = [runs.index(run) for run in expected]
            assert places == list(range(places[0], places[0] + len(places)))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("dense", ["--compressor", "dense"]),
        ("static", ["--compressor", "topk", "--ratio", "0.01", "--collective", "allgather"]),
        (
            "lgreco",
            ["--policy", "lgreco", "--compressor", "topk", "--ratio", "0.02", "--collective", "allgather"],
        ),
        ("flexible", ["--policy", '{"id": "flexible", "every": 50}']),
        ("auto", []),
    ],
)
def test_words_for_trainings(policy, words):
    where = FAST if ARMS[policy].looks else None
    found = words_of_training(Training("text-lstm", policy, 2, where), None)
    assert found == ["train", "--task", "text-lstm", "--seed", "2", "--no-verdict", *words, "--evaluate-every", "10"]
    short = words_of_training(Training("digits", policy, 2, where), 40)
    assert short == [
        "train",
        "--task",
        "digits",
        "--seed",
        "2",
        "--no-verdict",
        "--steps",
        "40",
        *words,
        "--evaluate-every",
        "2",
    ]


@pytest.mark.parametrize("network", [SLOW, FAST])
def test_words_for_timings(network):
    timing = Timing("text-lstm", ("dense", "static", "auto"), 0, network)
    traces = {"dense": "d.jsonl", "auto": "a.jsonl"}  # static has none
    step_bytes = {"dense": 38e6, "auto": 1e6}
    found = words_of_timing(timing, traces, step_bytes)
    assert found[:6] == ["bench", "training", "--task", "text-lstm", "--seed", "0"]
    words = dict(itertools.pairwise(found))
    assert words["--exchange"] == "dense,replay:a.jsonl"
    steps, blocks, warm_up = (int(words[name]) for name in ("--steps", "--blocks", "--warm-up"))
    assert steps == blocks * warm_up
    assert blocks == BLOCKS
    seconds = (steps + warm_up) * sum(8 * own / {SLOW: 50e6, FAST: 1e9}[network] for own in step_bytes.values())
    if network == FAST:
        assert steps == BLOCKS * LONGEST_BLOCK
    else:
        assert BLOCKS * SHORTEST_BLOCK <= steps < BLOCKS * LONGEST_BLOCK
    assert seconds < 150


def test_a_lab_for_each_network_and_a_launcher_on_one_host(jobs, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    all_of(tmp_path, networks=[SLOW], seeds=[0])
    assert names_of(jobs) == [
        "text-lstm-host-dense-0",
        "text-lstm-host-static-0",
        "text-lstm-50mbit-1ms-auto-0",
        "text-lstm-50mbit-1ms-timing",
    ]
    python = [sys.executable, "-m", "mpicomp"]
    assert jobs.commands[0][:8] == ["/bin/mpiexec", "-n", "4", *python, "train", "--task"]
    lab = [*python, "lab", "run", "--hosts", "4", "--bandwidth", "50mbit", "--latency", "1ms", "--", *python]
    for command, what in zip(jobs.commands[2:], ["train", "bench"], strict=True):
        assert command[: len(lab) + 1] == [*lab, what]
    written = [command[command.index("--metrics") + 1] for command in jobs.commands[1:3]]
    exchanges = jobs.commands[3][jobs.commands[3].index("--exchange") + 1]
    assert exchanges == ",".join(["dense", *(f"replay:{path}" for path in written)])


# What becomes of runs


def test_what_is_complete_is_not_run_again(jobs, tmp_path):
    first = all_of(tmp_path)
    number = len(jobs.commands)
    second = all_of(tmp_path)
    assert len(jobs.commands) == number == len(first.finished)
    assert all(own.kept for own in second.finished.values())
    assert rows_of(second.finished, [SLOW, FAST], 4) == rows_of(first.finished, [SLOW, FAST], 4)


def test_what_is_torn_is_run_again_and_what_was_timed_with_it(jobs, tmp_path):
    all_of(tmp_path)
    jobs.commands.clear()
    torn = tmp_path / "text-lstm-host-static-0.jsonl"
    torn.write_text(torn.read_text()[:-30])
    (tmp_path / "text-lstm-1gbit-0us-auto-1.done").unlink()
    (tmp_path / "text-lstm-1gbit-0us-timing.json").write_text('{"rows": []}')
    all_of(tmp_path)
    # Its plans came out as before, so that what was timed with them still counts.
    again = ["text-lstm-host-static-0", "text-lstm-1gbit-0us-timing", "text-lstm-1gbit-0us-auto-1"]
    assert names_of(jobs) == again
    jobs.commands.clear()
    (tmp_path / "text-lstm-host-static-0.done").unlink()
    jobs.rates["text-lstm-host-static-0"] = 0.91
    all_of(tmp_path)
    assert names_of(jobs) == [
        "text-lstm-host-static-0",
        "text-lstm-50mbit-1ms-timing",
        "text-lstm-1gbit-0us-timing",
    ]


def test_files_may_be_moved(jobs, tmp_path):
    (tmp_path / "a").mkdir()
    all_of(tmp_path / "a")
    jobs.commands.clear()
    (tmp_path / "a").rename(tmp_path / "b")
    found = all_of(tmp_path / "b").finished
    assert jobs.commands == []
    assert all(set(own.timed) == {"dense", "static", "auto"} for run, own in found.items() if isinstance(run, Timing))


def test_other_options_are_other_runs(jobs, tmp_path):
    number = len(all_of(tmp_path).finished)
    jobs.commands.clear()
    all_of(tmp_path, steps=60)
    trained = [command for command in jobs.commands if "--evaluate-every" in command]
    assert len(trained) == number - 2  # steps are timed on two networks
    assert all(command[command.index("--steps") + 1] == "60" for command in trained)


def test_a_run_that_fails_is_told_and_the_others_go_on(jobs, tmp_path):
    jobs.failing["text-lstm-host-static-0"] = "mpicomp: topk: too hot\n= BAD TERMINATION OF ONE OF YOUR PROCESSES\n"
    found = all_of(tmp_path).finished
    assert found[Training("text-lstm", "static", 0, None)].error == "mpicomp: topk: too hot"
    assert sum(own.status == DONE for own in found.values()) == len(found) - 1
    timing = next(own for run, own in found.items() if isinstance(run, Timing) and run.network == FAST)
    assert list(timing.timed) == ["dense", "auto"]
    rows = {row["policy"]: row for row in rows_of(found, [FAST], 4)}
    assert rows["static"]["error"] == "seed 0: mpicomp: topk: too hot"
    assert (rows["static"]["seeds"], rows["static"]["time_to_quality_s"]) == (1, None)
    assert rows["static"]["steps_to_quality"] is None  # it learns too slowly
    assert rows["auto"]["error"] is None
    jobs.failing.clear()
    jobs.commands.clear()
    all_of(tmp_path)
    assert names_of(jobs) == [
        "text-lstm-host-static-0",
        "text-lstm-50mbit-1ms-timing",
        "text-lstm-1gbit-0us-timing",
    ]


def test_a_timing_that_fails_is_told_of_every_policy(jobs, tmp_path):
    jobs.failing["text-lstm-1gbit-0us-timing"] = "mpicomp: replay: no\n"
    found = all_of(tmp_path).finished
    for row in rows_of(found, [SLOW, FAST], 4):
        slow = row["bandwidth"] == "50mbit"
        assert row["error"] == (None if slow else "timing: mpicomp: replay: no")
        assert (row["median_step_s"] is not None) == slow


def test_without_dense_there_is_no_target(jobs, tmp_path):
    jobs.failing["text-lstm-host-dense-1"] = "ValueError: no\n"
    found = all_of(tmp_path).finished
    rows = {row["policy"]: row for row in rows_of(found, [FAST], 4)}
    assert (rows["auto"]["seeds"], rows["auto"]["time_to_quality_s"]) == (2, None)
    assert rows["auto"]["median_step_s"] == 0.5 + CHOOSING_S
    assert rows["dense"]["seeds"] == 1
    assert rows["dense"]["error"] == "seed 1: ValueError: no"


def test_what_has_no_time_left_is_cut(jobs, tmp_path):
    runner = Runner(tmp_path, 4, None)
    dense, auto = Training("text-lstm", "dense", 0, None), Training("text-lstm", "auto", 0, FAST)
    assert runner.run(auto, 0.0).status == CUT
    timing = Timing("text-lstm", ("dense", "auto"), 0, FAST)
    assert runner.run(timing, 100.0).status == CUT
    assert jobs.commands == []
    runner.run(dense, 100.0)
    runner.finished[dense].seconds = 50.0
    again = Training("text-lstm", "dense", 1, None)
    assert runner.expected_s(again) == 50.0
    assert runner.run(again, 49.0).status == CUT
    assert runner.run(again, 51.0).status == DONE
    jobs.endless.add(auto.name)
    assert runner.run(auto, 100.0).status == CUT
    late = runner.run(auto, 1e6)
    assert (late.status, late.error) == (FAILED, "no end after 1800 s")
    assert list(runner.run(timing, 100.0).timed) == ["dense"]
    runner.run(auto, 0.0)
    lines = explained(rows_of(runner.finished, [FAST], 4), runner.finished)
    assert any(line.startswith("cut, since the time was over: text-lstm, 1gbit/0us, auto, seed 0") for line in lines)


def test_a_command_is_run_to_its_end_or_until_the_time_is_over(tmp_path):
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
def test_the_last_line_of_an_error(text, last, tmp_path):
    (tmp_path / "log").write_text(text)
    assert last_words(tmp_path / "log").startswith(last)
    assert last_words(tmp_path / "none") == ""


# The table


def test_a_row_is_of_its_seeds_and_its_network(jobs, tmp_path):
    found = all_of(tmp_path).finished
    rows = rows_of(found, [SLOW, FAST], 4)
    assert [(row["bandwidth"], row["policy"]) for row in rows] == [
        (network, policy) for network in ("50mbit", "1gbit") for policy in ("dense", "static", "auto")
    ]
    # Dense ends with 3.0 after 300 steps and has 3.03, the target, after 297.
    dense = rows[0]
    assert dense["steps_to_quality"] == pytest.approx(297)
    assert dense["time_to_quality_s"] == pytest.approx(297 * (2.0 + CHOOSING_S))
    assert dense["of_dense"] == 1.0
    assert dense["summed_s"] == pytest.approx(297 * (3.0 + CHOOSING_S))
    assert (dense["seeds"], dense["reached"], dense["shared"], dense["is_equal"]) == (2, 2, True, True)
    assert (dense["time_to_quality_s_deviation"], dense["median_step_s_deviation"]) == (0.0, 0.0)
    assert dense["wire_bytes"] == 300e6
    assert dense["quality_limit"] == pytest.approx(3.03)
    assert dense["mean_quality"] == pytest.approx((5.9 + 3.0) / 2)
    auto = rows[2]
    assert (auto["reached"], auto["time_to_quality_s"], auto["of_dense"], auto["is_equal"]) == (0, None, None, False)
    assert auto["shared"] is False
    assert rows[5]["median_step_s"] == 0.5 + CHOOSING_S
    cells = cells_of(auto)
    assert (cells["time_s"], cells["of_dense"], cells["reached"], cells["equal"]) == ("-", "-", "0/2", "no")
    assert cells_of(dense)["steps"] == "297 (0)"


def test_times_are_over_those_of_dense_with_the_same_seeds(jobs, tmp_path):
    jobs.rates = {"text-lstm-1gbit-0us-auto-0": 1.2, "text-lstm-host-dense-1": 0.5}
    runner = Runner(tmp_path, 4, None)
    for run in runs_of(["dense", "auto"], [FAST], {"text-lstm": [0, 1]}):
        runner.run(run, 0.0 if run.name == "text-lstm-1gbit-0us-auto-1" else 1e6)
    first, second = rows_of(runner.finished, [FAST], 4)
    assert (first["policy"], second["policy"]) == ("auto", "dense")  # the best first
    assert first["steps_to_quality"] == pytest.approx(297 / 1.2)
    # With seed 1 dense ends with 4.5 and has 4.545 after (6 - 4.545) / 1.5 of its steps.
    assert second["steps_to_quality"] == pytest.approx((297 + 291) / 2)
    assert second["steps_to_quality_deviation"] == pytest.approx(3 * 2**0.5)
    assert first["of_dense"] == pytest.approx(1 / 1.2)
    assert (first["seeds"], second["of_dense"]) == (1, 1.0)
    assert first["error"] == "1 of 3 runs were cut: the time was over"


def test_higher_is_better_for_digits(jobs, tmp_path):
    runner = Runner(tmp_path, 4, None)
    for run in runs_of(["dense", "static", "auto"], [FAST], {"digits": [0]}):
        runner.run(run, 1e6)
    rows = {row["policy"]: row for row in rows_of(runner.finished, [FAST], 4)}
    # From 0.5 to 0.9 in 200 steps: 0.885 after 192.5.
    assert rows["dense"]["steps_to_quality"] == pytest.approx(192.5)
    assert rows["dense"]["quality_limit"] == pytest.approx(0.885)
    assert rows["auto"]["quality"] == pytest.approx(0.88)
    assert (rows["auto"]["is_equal"], rows["auto"]["reached"]) == (False, 0)


def test_the_command(jobs, tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["--policies", "auto,static", "--networks", "50mbit/1ms,1gbit/0us,50mbit/1ms", "--json", str(path)]
    assert main(["bench", "policies", *words]) == 0
    shown = capsys.readouterr().out
    digits, text = 5 * (2 + 2) + 2, 3 * (2 + 2) + 2
    assert f"{digits + text} runs, 4 hosts, at most 120 minutes" in shown
    assert len(jobs.commands) == digits + text == sum(" left, about " in line for line in shown.splitlines())
    assert f"{digits + text}/{digits + text}" in shown
    assert "0 left, about 0 minutes" in shown
    tables = [line for line in shown.splitlines() if line.startswith(("digits, 4 hosts", "text-lstm, 4 hosts"))]
    assert len(tables) == 4
    assert "shared: dense, static do not look at the network" in shown
    assert "not shared: auto" in shown
    written = json.loads(path.read_text())
    assert list(written) == ["schema", "environment", "rows", "runs"]
    assert written["schema"] == 1
    assert len(written["rows"]) == 2 * 2 * 3
    assert len(written["runs"]) == digits + text
    assert str(tmp_path) not in path.read_text()
    for name in ("rows", "runs"):
        fields = documented("benchmarks.md", f"{name.capitalize()} of policies")
        for own in written[name]:
            assert list(own) == list(fields)
            check_types(own, fields)


def test_the_quick_form(jobs, capsys):
    assert main(["bench", "policies", "--quick", "--policies", "static,auto"]) == 0
    shown = capsys.readouterr().out
    assert f"{2 * (2 + 2 * 2)} runs, 4 hosts, at most 45 minutes" in shown
    links = {(command[8], command[10]) for command in jobs.commands if "lab" in command}
    assert links == {("200mbit", "1ms"), ("2.5gbit", "0us")}
    assert all(command[command.index("--seed") + 1] == "0" for command in jobs.commands)


def test_the_command_goes_on_where_it_stopped_and_fails_where_a_run_does(jobs, tmp_path, capsys):
    words = ["bench", "policies", "--quick", "--tasks", "digits", "--policies", "auto", "--keep", str(tmp_path / "k")]
    jobs.failing["digits-2.5gbit-0us-auto-0"] = "mpicomp: train: no\n"
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "failed: mpicomp: train: no" in shown
    assert "seed 0: mpicomp: train: no" in shown
    jobs.failing.clear()
    jobs.commands.clear()
    assert main(words) == 0
    assert names_of(jobs) == ["digits-2.5gbit-0us-auto-0", "digits-2.5gbit-0us-timing"]
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policies", "atuo"], "bench policies: --policies: unknown name 'atuo'; did you mean 'auto'?"),
        (["--policies", ","], "bench policies: --policies names nothing"),
        (["--tasks", "vgg"], "bench policies: --tasks: unknown name 'vgg'"),
        (["--networks", "1gbit"], "lab: a network must be like 50mbit/1ms, got '1gbit'"),
        (["--networks", ","], "bench policies: --networks names nothing"),
        (["--seeds", "a"], "bench policies: --seeds must be whole numbers such as 0,1,2, got 'a'"),
        (["--seeds", "-1"], "bench policies: --seeds must be at least 0, got -1"),
        (["--steps", "0"], "bench policies: --steps must be at least 1, got 0"),
        (["--hosts", "1"], "bench policies: --hosts must be at least 2, got 1"),
        (["--limit", "0"], "bench policies: --limit must be minutes above 0, got 0.0"),
        (["--json", "/nonexistent/out.json"], "bench policies: '/nonexistent/out.json' cannot be written"),
        (["--keep", "a,b"], "bench policies: --keep must be a folder without commas, got 'a,b'"),
        (["--keep", "/proc/none"], "bench policies: '/proc/none/files' cannot be written"),
    ],
)
def test_bad_words_are_told_before_anything_is_run(arguments, text, jobs, capsys):
    assert main(["bench", "policies", *arguments]) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.out == ""
    assert jobs.commands == []


def test_labs_need_root(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["bench", "policies"]) == 2
    assert "bench policies: a lab needs root to make network namespaces" in capsys.readouterr().err


def test_every_task_has_a_goal_that_its_task_agrees_with():
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from mpicomp.bench.tasks.digits import Digits
    from mpicomp.bench.tasks.text import TextLSTM

    for task in (Digits, TextLSTM):
        goal = GOALS[task.name]
        assert task.better == ("lower" if goal.lower else "higher")
        assert task.steps % goal.every == 0  # so that the last step is looked at
        assert STEPS[task.name] == task.steps


def test_a_real_training_on_one_host(tmp_path, clean_environ, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    if not Path(sys.executable).with_name("mpiexec").exists():
        pytest.skip("there is no mpiexec beside this Python")
    monkeypatch.setattr("os.environ", dict(clean_environ))
    runner = Runner(tmp_path, 1, 6)
    dense = runner.run(Training("digits", "dense", 0, None), 100.0)
    assert dense.status == DONE, (tmp_path / "digits-host-dense-0.log").read_text()
    assert [step for step, _ in dense.curve] == [1, 2, 3, 4, 5, 6]
    assert dense.curve[-1][1] == dense.quality  # of digits all held-out images are looked at on the way
    assert dense.outcome["ranks"] == 1
