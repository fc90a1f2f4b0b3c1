"""What is run to compare policies, in which order, and what the table says of it."""

import itertools
import json
import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpicomp.bench.networks import Network
from mpicomp.bench.policies import ARMS, GOALS, REPLAYED, REPLAYED_LEAST, Run, runs_of, words_of
from mpicomp.bench.policy_runs import CUT, DONE, FAILED, Trainings, execute, last_words
from mpicomp.bench.policy_table import (
    cells_of,
    explained,
    mean_over_steps,
    mean_step_s,
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


class Jobs:
    """Stands in for processes: writes what `mpicomp train` would, and remembers what it was told."""

    def __init__(self):
        self.commands = []
        self.failing = {}
        self.endless = set()
        self.rates = {}  # of runs by name, where they are not those of their policy

    def __call__(self, command, environment, log, limit_s):
        self.commands.append(command)
        words = dict(itertools.pairwise(command))
        name = Path(words["--json"]).stem
        if name in self.endless:
            return None
        log.write_text("begin\n" + self.failing.get(name, ""))
        if name in self.failing:
            return 3
        task, policy = words["--task"], name.removesuffix("-replay").split("-")[-2]
        rate = self.rates.get(name, RATE[policy])
        steps = int(words.get("--steps", STEPS[task]))
        every = int(words.get("--evaluate-every", steps + 1))
        network = None
        if "lab" in command:
            network = Network(words["--bandwidth"], words["--latency"])
        lines = []
        for step in range(steps):
            quality = quality_of(task, rate, step + 1, steps) if (step + 1) % every == 0 else None
            lines.append({"step": step, "seconds": MEDIAN_S.get(network, 1.0) * (1 + (step % 2)), "quality": quality})
        Path(words["--metrics"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        outcome = {"steps": steps, "median_step_s": MEDIAN_S.get(network, 1.0), "wire_bytes": 1_000_000 * steps}
        outcome["quality"] = {"value": quality_of(task, rate, steps, steps)}
        Path(words["--json"]).write_text(json.dumps(outcome))
        return 0


def quality_of(task, rate, step, steps):
    """A loss that falls along a line, or an accuracy that rises along one."""
    share = rate * step / steps
    return 6 - 3 * share if task == "text-lstm" else 0.5 + 0.4 * share


@pytest.fixture
def jobs(monkeypatch):
    found = Jobs()
    monkeypatch.setattr("mpicomp.bench.policy_runs.execute", found)
    monkeypatch.setattr("mpicomp.bench.policy_runs.find_launcher", lambda: Path("/bin/mpiexec"))
    monkeypatch.setattr("mpicomp.bench.policy_runs.find_mpi", lambda launcher: "mpich")
    monkeypatch.setattr("mpicomp.bench.networks.check_lab", lambda command: None)
    monkeypatch.setattr("mpicomp.cli.bench_policies._check_tasks", lambda: None)
    return found


def all_of(folder, policies=("dense", "static", "auto"), networks=(SLOW, FAST), seeds=(0, 1), steps=None, left_s=1e6):
    trainings = Trainings(folder, 4, steps)
    for run in runs_of(policies, networks, {"text-lstm": list(seeds)}):
        trainings.run(run, left_s)
    return trainings


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


def test_the_mean_step_is_of_the_steps_up_to_there():
    seconds = [100.0] * 5 + [1.0] * 5 + [2.0] * 10
    assert mean_step_s(seconds, 0.5) == 1.0
    assert mean_step_s(seconds, 1.0) == pytest.approx(25 / 15)
    assert mean_step_s(seconds, 0.01) == 1.0


# What is run


def test_every_training_is_there_once_and_what_is_compared_is_neighbours():
    policies = ["dense", "static", "gravac", "auto"]
    runs = runs_of(policies, [SLOW, FAST], {"digits": [0, 1, 2], "text-lstm": [0, 1]})
    assert len(set(runs)) == len(runs)
    assert len({run.name for run in runs}) == len(runs)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for task, seeds in {"digits": [0, 1, 2], "text-lstm": [0, 1]}.items():
        for seed in seeds:
            own = [run for run in runs if run.task == task and run.seed == seed]
            assert [(run.policy, run.network, run.replay) for run in own[:2]] == [
                ("dense", None, False),
                ("static", None, False),
            ]
            expected = []
            for network in (SLOW, FAST):
                played = [("dense", network, True), ("static", network, True)] if seed == 0 else []
                expected += [*played, ("gravac", network, False), ("auto", network, False)]
            assert [(run.policy, run.network, run.replay) for run in own[2:]] == expected
            places = [runs.index(run) for run in own]
            assert places == list(range(places[0], places[0] + len(own)))


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
    found = words_of(Run("text-lstm", policy, 2, where), None, None, "")
    assert found == ["train", "--task", "text-lstm", "--seed", "2", "--no-verdict", *words, "--evaluate-every", "10"]
    short = words_of(Run("digits", policy, 2, where), 40, None, "")
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


def test_words_for_replays():
    traced = {"steps": 300, "wire_bytes": 300 * 38e6}  # 6 s a step on the slow network
    dense = words_of(Run("text-lstm", "dense", 0, SLOW, True), None, traced, "t.jsonl")
    assert dense[-2:] == ["--compressor", "dense"]
    steps = int(dense[dense.index("--steps") + 1])
    assert REPLAYED_LEAST <= steps < REPLAYED
    assert steps * 38e6 * 8 / 50e6 < 150
    other = words_of(Run("text-lstm", "static", 0, FAST, True), None, {"steps": 300, "wire_bytes": 1e6}, "t.jsonl")
    assert other[-4:] == ["--steps", str(REPLAYED), "--replay", "t.jsonl"]
    assert "--evaluate-every" not in dense + other


def test_a_lab_for_each_network_and_a_launcher_on_one_host(jobs, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    all_of(tmp_path, networks=[SLOW], seeds=[0])
    assert names_of(jobs) == [
        "text-lstm-host-dense-0",
        "text-lstm-host-static-0",
        "text-lstm-50mbit-1ms-dense-0-replay",
        "text-lstm-50mbit-1ms-static-0-replay",
        "text-lstm-50mbit-1ms-auto-0",
    ]
    python = [sys.executable, "-m", "mpicomp"]
    assert jobs.commands[0][:8] == ["/bin/mpiexec", "-n", "4", *python, "train", "--task"]
    lab = [*python, "lab", "run", "--hosts", "4", "--bandwidth", "50mbit", "--latency", "1ms", "--", *python, "train"]
    for command in jobs.commands[2:]:
        assert command[: len(lab)] == lab
    trace = jobs.commands[3][jobs.commands[3].index("--replay") + 1]
    assert trace == jobs.commands[1][jobs.commands[1].index("--metrics") + 1]


# What becomes of runs


def test_what_is_complete_is_not_run_again(jobs, tmp_path):
    first = all_of(tmp_path)
    number = len(jobs.commands)
    second = all_of(tmp_path)
    assert len(jobs.commands) == number == len(first.finished)
    assert all(own.kept for own in second.finished.values())
    assert rows_of(second.finished, [SLOW, FAST], 4) == rows_of(first.finished, [SLOW, FAST], 4)


def test_what_is_torn_is_run_again_and_what_was_played_from_it(jobs, tmp_path):
    all_of(tmp_path)
    jobs.commands.clear()
    torn = tmp_path / "text-lstm-host-static-0.jsonl"
    torn.write_text(torn.read_text()[:-30])
    (tmp_path / "text-lstm-1gbit-0us-auto-1.done").unlink()
    all_of(tmp_path)
    # Its trace came out as before, so that what was played of it still counts.
    assert names_of(jobs) == ["text-lstm-host-static-0", "text-lstm-1gbit-0us-auto-1"]
    jobs.commands.clear()
    (tmp_path / "text-lstm-host-static-0.done").unlink()
    jobs.rates["text-lstm-host-static-0"] = 0.91
    all_of(tmp_path)
    assert sorted(names_of(jobs)) == [
        "text-lstm-1gbit-0us-static-0-replay",
        "text-lstm-50mbit-1ms-static-0-replay",
        "text-lstm-host-static-0",
    ]


def test_other_options_are_other_runs(jobs, tmp_path):
    number = len(all_of(tmp_path).finished)
    jobs.commands.clear()
    all_of(tmp_path, steps=60)
    trained = [command for command in jobs.commands if "--evaluate-every" in command]
    assert len(trained) == number - 4  # dense and static, played on two networks
    assert all(command[command.index("--steps") + 1] == "60" for command in trained)


def test_a_run_that_fails_is_told_and_the_others_go_on(jobs, tmp_path):
    jobs.failing["text-lstm-host-static-0"] = "mpicomp: topk: too hot\n= BAD TERMINATION OF ONE OF YOUR PROCESSES\n"
    found = all_of(tmp_path).finished
    assert found[Run("text-lstm", "static", 0, None)].error == "mpicomp: topk: too hot"
    assert found[Run("text-lstm", "static", 0, FAST, True)].status == FAILED
    assert "text-lstm-1gbit-0us-static-0-replay" not in names_of(jobs)
    assert sum(own.status == DONE for own in found.values()) == len(found) - 3
    rows = {row["policy"]: row for row in rows_of(found, [FAST], 4)}
    assert rows["static"]["error"] == "seed 0: mpicomp: topk: too hot"
    assert (rows["static"]["seeds"], rows["static"]["time_to_quality_s"]) == (1, None)
    assert rows["static"]["steps_to_quality"] is None  # it learns too slowly
    assert rows["auto"]["error"] is None
    jobs.failing.clear()
    jobs.commands.clear()
    all_of(tmp_path)
    assert sorted(names_of(jobs)) == [
        "text-lstm-1gbit-0us-static-0-replay",
        "text-lstm-50mbit-1ms-static-0-replay",
        "text-lstm-host-static-0",
    ]


def test_without_dense_there_is_no_target(jobs, tmp_path):
    jobs.failing["text-lstm-host-dense-1"] = "ValueError: no\n"
    found = all_of(tmp_path).finished
    rows = {row["policy"]: row for row in rows_of(found, [FAST], 4)}
    assert (rows["auto"]["seeds"], rows["auto"]["time_to_quality_s"]) == (2, None)
    assert rows["auto"]["median_step_s"] == 0.5
    assert rows["dense"]["seeds"] == 1
    assert rows["dense"]["error"] == "seed 1: ValueError: no"


def test_what_has_no_time_left_is_cut(jobs, tmp_path):
    trainings = Trainings(tmp_path, 4, None)
    dense, auto = Run("text-lstm", "dense", 0, None), Run("text-lstm", "auto", 0, FAST)
    assert trainings.run(auto, 0.0).status == CUT
    assert jobs.commands == []
    trainings.run(dense, 100.0)
    trainings.finished[dense].seconds = 50.0
    again = Run("text-lstm", "dense", 1, None)
    assert trainings.expected_s(again) == 50.0
    assert trainings.run(again, 49.0).status == CUT
    assert trainings.run(again, 51.0).status == DONE
    jobs.endless.add(auto.name)
    assert trainings.run(auto, 100.0).status == CUT
    late = trainings.run(auto, 1e6)
    assert (late.status, late.error) == (FAILED, "no end after 1800 s")
    played = trainings.run(Run("text-lstm", "static", 0, FAST, True), 100.0)
    assert played.status == CUT
    trainings.run(auto, 0.0)
    lines = explained(rows_of(trainings.finished, [FAST], 4), trainings.finished)
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
    assert dense["time_to_quality_s"] == pytest.approx(297 * 2.0)
    assert dense["of_dense"] == 1.0
    steps = REPLAYED  # the n-th takes 2.0 and 4.0 in turn; the first five are left out
    seconds = [2.0 * (1 + step % 2) for step in range(steps)]
    assert dense["summed_s"] == pytest.approx(297 * np.mean(seconds[5:]))
    assert (dense["seeds"], dense["reached"], dense["shared"], dense["is_equal"]) == (2, 2, True, True)
    assert (dense["time_to_quality_s_deviation"], dense["median_step_s_deviation"]) == (0.0, None)
    assert dense["wire_bytes"] == 300e6
    assert dense["quality_limit"] == pytest.approx(3.03)
    assert dense["mean_quality"] == pytest.approx((5.9 + 3.0) / 2)
    auto = rows[2]
    assert (auto["reached"], auto["time_to_quality_s"], auto["of_dense"], auto["is_equal"]) == (0, None, None, False)
    assert auto["shared"] is False
    assert rows[5]["median_step_s"] == 0.5
    cells = cells_of(auto)
    assert (cells["time_s"], cells["of_dense"], cells["reached"], cells["equal"]) == ("-", "-", "0/2", "no")
    assert cells_of(dense)["steps"] == "297 (0)"


def test_times_are_over_those_of_dense_with_the_same_seeds(jobs, tmp_path):
    jobs.rates = {"text-lstm-1gbit-0us-auto-0": 1.2, "text-lstm-host-dense-1": 0.5}
    trainings = Trainings(tmp_path, 4, None)
    for run in runs_of(["dense", "auto"], [FAST], {"text-lstm": [0, 1]}):
        trainings.run(run, 0.0 if run.policy == "auto" and run.seed == 1 else 1e6)
    first, second = rows_of(trainings.finished, [FAST], 4)
    assert (first["policy"], second["policy"]) == ("auto", "dense")  # the best first
    assert first["steps_to_quality"] == pytest.approx(297 / 1.2)
    # With seed 1 dense ends with 4.5 and has 4.545 after (6 - 4.545) / 1.5 of its steps.
    assert second["steps_to_quality"] == pytest.approx((297 + 291) / 2)
    assert second["steps_to_quality_deviation"] == pytest.approx(3 * 2**0.5)
    assert first["of_dense"] == pytest.approx(1 / 1.2)
    assert (first["seeds"], second["of_dense"]) == (1, 1.0)
    assert first["error"] == "1 of 2 runs were cut: the time was over"


def test_higher_is_better_for_digits(jobs, tmp_path):
    trainings = Trainings(tmp_path, 4, None)
    for run in runs_of(["dense", "static", "auto"], [FAST], {"digits": [0]}):
        trainings.run(run, 1e6)
    rows = {row["policy"]: row for row in rows_of(trainings.finished, [FAST], 4)}
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
    digits, text = 5 * (2 + 2) + 2 * 2, 3 * (2 + 2) + 2 * 2
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
    assert f"{2 * (2 + 2 * 3)} runs, 4 hosts, at most 45 minutes" in shown
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
    assert names_of(jobs) == ["digits-2.5gbit-0us-auto-0"]
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
    trainings = Trainings(tmp_path, 1, 6)
    dense = trainings.run(Run("digits", "dense", 0, None), 100.0)
    assert dense.status == DONE, (tmp_path / "digits-host-dense-0.log").read_text()
    assert [step for step, _ in dense.curve] == [1, 2, 3, 4, 5, 6]
    assert dense.curve[-1][1] == dense.quality  # of digits all held-out images are looked at on the way
    assert len(dense.step_s) == 6
    assert dense.outcome["ranks"] == 1
