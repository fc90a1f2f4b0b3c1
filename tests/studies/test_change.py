"""When a change of the network is seen, and how soon the right plan was run."""

import change
import numpy as np
import pytest
from change import Step, lines_of, medians_of, phases_of, run_steps, seen_at
from study_words import call

from mpicomp import TopK
from mpicomp.transport import LocalWorld

FIXED = {
    "1gbit": {"topk allgather": 0.010, "topk star-topk:ring": 0.020, "dense ring": 0.0103},
    "50mbit": {"topk allgather": 0.200, "topk star-topk:ring": 0.100, "dense ring": 0.5},
}


def timeline():
    """Give steps of 20 s: fast, slow from 10.3 s on, with the old plan for 4 more steps."""
    steps, at = [], 0.0
    while at < 20:
        slow = at >= 10.3
        late = sum(step.seconds > 0.15 for step in steps)
        plan = "topk star-topk:ring" if slow and late >= 4 else "topk allgather"
        seconds = FIXED["50mbit" if slow else "1gbit"][plan]
        steps.append(Step(at, seconds, plan))
        at += seconds + 0.001
    return steps


def test_how_soon_the_best_plan_was_run():
    steps = timeline()
    first, second = phases_of(steps, ["1gbit", "50mbit"], 10.0, FIXED)
    changed = next(place for place, step in enumerate(steps) if step.seconds > 0.05)
    assert (first.first, first.best, first.steps, first.share) == (0, "topk allgather", 0, 1.0)
    assert (first.mostly, second.mostly) == ("topk allgather", "topk star-topk:ring")
    assert first.as_good == ("topk allgather", "dense ring")
    assert (second.first, second.best, second.steps, second.share) == (changed, "topk star-topk:ring", 4, 1.0)


def test_a_change_for_the_better_is_seen_too():
    steps = [Step(place / 10, 0.1 if place < 60 else 0.02, "a") for place in range(100)]
    assert seen_at(steps, 5.0) == 60


def test_an_accident_is_no_change():
    random = np.random.default_rng(0)
    steps = [Step(place / 10, 0.1 * random.uniform(0.8, 1.2), "a") for place in range(100)]
    steps[50] = Step(5.0, 3.0, "a")
    assert seen_at(steps, 5.0) is None


def test_what_was_not_seen_or_never_run():
    steps = [Step(place / 10, 0.1, "dense ring") for place in range(100)]
    first, second = phases_of(steps, ["50mbit", "1gbit"], 5.0, FIXED)
    assert (first.first, first.steps, first.share) == (0, None, 0.0)
    assert (second.first, second.steps, second.share, second.mostly) == (None, None, 0.0, None)


def test_every_step_is_shown_once():
    steps = timeline()
    changed = seen_at(steps, 10.0)
    lines = list(lines_of(steps, [changed]))
    numbers = []
    for line in lines:
        words = line.partition(" s  ")[2].partition(":")[0].split()
        numbers += range(int(words[1]), int(words[-1]) + 1)
    assert numbers == list(range(len(steps)))
    (marked,) = (line for line in lines if "the change is seen" in line)
    assert f"step {changed}:" in marked
    assert len(lines) < len(steps) / 5


def test_plans_that_were_not_run_have_no_median():
    rows = [
        {"compressor": "dense", "collective": "ring", "median_s": 2.0},
        {"compressor": "dense", "collective": "allreduce", "median_s": None},
    ]
    assert medians_of(rows) == {"dense ring": 2.0}


@pytest.mark.slow
def test_steps_of_auto():
    for _ in range(2):  # in which everything is compiled, which may take longer than the time that is given
        run_steps(TopK(ratio=0.1), 1000, 1.0, LocalWorld(1).transports[0])
    steps = run_steps(TopK(ratio=0.1), 1000, 2.0, LocalWorld(1).transports[0])
    assert len(steps) > 3
    assert all(step.seconds > 0 for step in steps)
    times = [step.at_s for step in steps]
    assert times == sorted(times)
    assert times[-1] < 2
    assert {step.plan for step in steps} == {"topk allgather"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--bandwidths", "1"], "lab: bandwidth must be a number with bit, kbit, mbit or gbit, got '1'"),
        (["--seconds", "0"], "change: --seconds must be a number above 0, got 0.0"),
        (["--ratio", "0.1,0.2"], "change: --compressor and --ratio must give one plan's, got 2"),
    ],
)
def test_bad_words_are_told_before_anything_is_measured(words, text, capsys):
    assert call(change, words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("mpicomp: ")
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_labs_need_root(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert call(change, []) == 2
    assert "a lab needs root to make network namespaces" in capsys.readouterr().err
