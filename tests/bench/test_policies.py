"""What is run to compare policies, and in which order."""

import itertools

import pytest
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
from policy_jobs import FAST, SLOW, STEPS


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
