"""What is run to compare policies, in which order, and what becomes of it."""

import itertools
import sys
from pathlib import Path

import pytest
from comparison import Training, unfinished
from mpicomp.bench.measure.jobs import CUT, DONE, FAILED
from no_processes import stand_in
from policy_jobs import CHOOSING_S, FAST, SLOW, STEPS, Jobs, all_of, names_of
from policy_runs import (
    BLOCKS,
    EVALUATE_EVERY,
    GOALS,
    LONGEST_BLOCK,
    LOOKING,
    SHORTEST_BLOCK,
    Runner,
    Timing,
    runs_of,
    words_of_timing,
    words_of_training,
)
from policy_table import Table


@pytest.fixture
def jobs(monkeypatch):
    return stand_in(monkeypatch, Jobs())


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
                    assert [own.arm for own in expected[-1].sources] == policies
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
    where = FAST if policy in LOOKING else None
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


def test_every_task_has_a_goal_that_its_task_agrees_with():
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from mpicomp.bench.tasks.digits import Digits
    from mpicomp.bench.tasks.text import TextLSTM

    for task in (Digits, TextLSTM):
        assert task.better == ("lower" if GOALS[task.name].lower else "higher")
        assert task.steps % EVALUATE_EVERY[task.name] == 0  # so that the last step is looked at
        assert STEPS[task.name] == task.steps


def test_a_lab_for_each_network_and_a_launcher_on_one_host(jobs, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    all_of(tmp_path, networks=[SLOW], seeds=[0])
    assert names_of(jobs) == [
        "text-lstm-host-dense-0",
        "text-lstm-host-static-0",
        "text-lstm-50mbit-1ms-auto-0",
        "text-lstm-50mbit-1ms-timing-0",
    ]
    python = [sys.executable, "-m", "mpicomp"]
    assert jobs.commands[0][:8] == ["/bin/mpiexec", "-n", "4", *python, "train", "--task"]
    lab = [*python, "lab", "run", "--hosts", "4", "--bandwidth", "50mbit", "--latency", "1ms", "--", *python]
    for command, what in zip(jobs.commands[2:], ["train", "bench"], strict=True):
        assert command[: len(lab) + 1] == [*lab, what]
    written = [command[command.index("--metrics") + 1] for command in jobs.commands[1:3]]
    exchanges = jobs.commands[3][jobs.commands[3].index("--exchange") + 1]
    assert exchanges == ",".join(["dense", *(f"replay:{path}" for path in written)])


def test_what_is_complete_is_not_run_again(jobs, tmp_path):
    first = all_of(tmp_path)
    number = len(jobs.commands)
    second = all_of(tmp_path)
    assert len(jobs.commands) == number == len(first.finished)
    assert all(own.kept for own in second.finished.values())
    assert Table(second.finished, [SLOW, FAST], 4).rows() == Table(first.finished, [SLOW, FAST], 4).rows()


def test_what_is_torn_is_run_again_and_what_was_timed_with_it(jobs, tmp_path):
    all_of(tmp_path)
    jobs.commands.clear()
    torn = tmp_path / "text-lstm-host-static-0.jsonl"
    torn.write_text(torn.read_text()[:-30])
    (tmp_path / "text-lstm-1gbit-0us-auto-1.done").unlink()
    (tmp_path / "text-lstm-1gbit-0us-timing-0.json").write_text('{"rows": []}')
    all_of(tmp_path)
    # Its plans came out as before, so that what was timed with them still counts.
    again = ["text-lstm-host-static-0", "text-lstm-1gbit-0us-timing-0", "text-lstm-1gbit-0us-auto-1"]
    assert names_of(jobs) == again
    jobs.commands.clear()
    (tmp_path / "text-lstm-host-static-0.done").unlink()
    jobs.rates["text-lstm-host-static-0"] = 0.91
    all_of(tmp_path)
    assert names_of(jobs) == [
        "text-lstm-host-static-0",
        "text-lstm-50mbit-1ms-timing-0",
        "text-lstm-1gbit-0us-timing-0",
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
    rows = {row["policy"]: row for row in Table(found, [FAST], 4).rows()}
    assert rows["static"]["error"] == "seed 0: mpicomp: topk: too hot"
    assert (rows["static"]["seeds"], rows["static"]["time_to_quality_s"]) == (1, None)
    assert rows["static"]["steps_to_quality"] is None  # it learns too slowly
    assert rows["auto"]["error"] is None
    jobs.failing.clear()
    jobs.commands.clear()
    all_of(tmp_path)
    assert names_of(jobs) == [
        "text-lstm-host-static-0",
        "text-lstm-50mbit-1ms-timing-0",
        "text-lstm-1gbit-0us-timing-0",
    ]


def test_a_timing_that_fails_is_told_of_every_policy(jobs, tmp_path):
    jobs.failing["text-lstm-1gbit-0us-timing-0"] = "mpicomp: replay: no\n"
    found = all_of(tmp_path).finished
    for row in Table(found, [SLOW, FAST], 4).rows():
        slow = row["bandwidth"] == "50mbit"
        assert row["error"] == (None if slow else "timing: mpicomp: replay: no")
        assert (row["median_step_s"] is not None) == slow


def test_without_dense_there_is_no_target(jobs, tmp_path):
    jobs.failing["text-lstm-host-dense-1"] = "ValueError: no\n"
    found = all_of(tmp_path).finished
    rows = {row["policy"]: row for row in Table(found, [FAST], 4).rows()}
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
    lines = unfinished(runner.finished.values())
    assert any(line.startswith("cut, since the time was over: text-lstm, 1gbit/0us, auto, seed 0") for line in lines)


@pytest.mark.slow
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
