"""What the table of policies says: steps to a quality, times and rows."""

import math
import random

import pytest
from no_processes import stand_in
from policy_jobs import CHOOSING_S, FAST, SLOW, Jobs, all_of
from policy_runs import Runner, runs_of
from policy_table import Table, mean_over_steps, smoothed, steps_to


@pytest.fixture
def jobs(monkeypatch):
    return stand_in(monkeypatch, Jobs())


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


def test_a_row_is_of_its_seeds_and_its_network(jobs, tmp_path):
    found = all_of(tmp_path).finished
    table = Table(found, [SLOW, FAST], 4)
    rows = table.rows()
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
    cells = table.cells(auto)
    assert (cells["time_s"], cells["of_dense"], cells["reached"], cells["equal"]) == ("-", "-", "0/2", "no")
    assert table.cells(dense)["steps"] == "297 (0)"


def test_times_are_over_those_of_dense_with_the_same_seeds(jobs, tmp_path):
    jobs.rates = {"text-lstm-1gbit-0us-auto-0": 1.2, "text-lstm-host-dense-1": 0.5}
    runner = Runner(tmp_path, 4, None)
    for run in runs_of(["dense", "auto"], [FAST], {"text-lstm": [0, 1]}):
        runner.run(run, 0.0 if run.name == "text-lstm-1gbit-0us-auto-1" else 1e6)
    first, second = Table(runner.finished, [FAST], 4).rows()
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
    rows = {row["policy"]: row for row in Table(runner.finished, [FAST], 4).rows()}
    # From 0.5 to 0.9 in 200 steps: 0.885 after 192.5.
    assert rows["dense"]["steps_to_quality"] == pytest.approx(192.5)
    assert rows["dense"]["quality_limit"] == pytest.approx(0.885)
    assert rows["auto"]["quality"] == pytest.approx(0.88)
    assert (rows["auto"]["is_equal"], rows["auto"]["reached"]) == (False, 0)
