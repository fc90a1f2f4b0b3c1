"""Studies whose trainings run in this process: penalties, constants and updates."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

import constants  # noqa: E402
import penalties  # noqa: E402, some need torch
import update_exchanges  # noqa: E402

from mpicomp.policies import convergence_penalty as formulas  # noqa: E402
from mpicomp.policies.convergence_penalty import ElementStatistics, ElementSurvey  # noqa: E402

RANKS = 4
SLOWER = {"topk:0.1": 0.1, "topk:0.01": 0.4, "qsgd": 0.0}


def observed(signal=0.3):
    elements, random = ElementStatistics(4000, len(penalties._QUANTISERS)), np.random.default_rng(0)
    quantisers = [penalties.exchange_of(name)[0] for name in penalties._QUANTISERS]
    surveys = [ElementSurvey((4000,), quantisers) for _ in range(RANKS)]
    for step in range(30):
        grads = random.standard_normal((RANKS, 4000)).astype(np.float32) + np.float32(signal)
        elements.observe(np.array([s.measure(g, None, (4000,), step) for s, g in zip(surveys, grads, strict=True)]))
    return elements


def rows(task, signal=0.3):
    """Rows of trainings that are slower by known shares."""
    steps, same = np.arange(200), {"task": task, "seed": 0, "steps": 200, "optimizer": "task"}
    elements = [{"step": 100, **observed(signal).state_dict()}]
    yield same | {"exchange": "dense", "losses": np.exp(2 - 0.02 * steps), "elements": elements}
    for name, share in SLOWER.items():
        yield same | {"exchange": name, "losses": np.exp(2 - 0.02 * (1 - share) * steps), "elements": []}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_steps_behind_are_the_share_by_which_training_is_slower(share):
    steps = np.arange(200)
    noise = np.random.default_rng(0).normal(scale=0.2, size=200)  # of batches, which are the same
    dense, late = (np.exp(2 - 0.02 * done + noise) for done in (steps, (1 - share) * steps))
    assert penalties.steps_behind(dense, late) == pytest.approx(share, abs=0.03)


def test_behind_predicts_more_for_smaller_ratios():
    elements = observed()
    assert penalties.predict(ElementStatistics(4000, len(penalties._QUANTISERS)), "topk:0.1", 100) is None
    exchanges = ("topk:0.3", "topk:0.1", "qsgd", "powersgd", "topk:0.1:star-topk", "onebit:2", "onebit")
    few, more, qsgd, powersgd, star, two, one = (penalties.predict(elements, name, 100) for name in exchanges)
    assert powersgd is None
    assert 0 <= few < more < 1
    assert more < star
    assert 0 <= qsgd < more
    assert 0 <= two < one < 1


def test_sgd_is_predicted_without_bursts():
    sgd = ElementStatistics(4000, len(penalties._QUANTISERS), normalises=False)
    sgd.load_state_dict(observed().state_dict())
    assert penalties.predict(sgd, "topk:0.05", 100) < penalties.predict(observed(), "topk:0.05", 100)


@pytest.mark.slow
def test_behind_makes_each_row_once(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        for optimizer in ("task", "sgd"):
            words = ["--steps", "24", "--exchange", "topk:0.05", "--rows", str(path), "--optimizer", optimizer]
            words += ["--picture", str(tmp_path / "losses.svg")]
            assert penalties.run(penalties.parser().parse_args(words)) == 0
    dense, topk, *of_sgd = (json.loads(line) for line in path.read_text().splitlines())
    assert [row["optimizer"] for row in (dense, topk, *of_sgd)] == ["task", "task", "sgd", "sgd"]
    assert (dense["exchange"], dense["delay"], topk["exchange"]) == ("dense", 0.0, "topk:0.05")
    assert 0 < dense["predicted"]["topk:0.05"] < 1
    picture = (tmp_path / "losses-digits.svg").read_text()
    assert "topk Adam" in picture
    assert "topk SGD" in picture


def test_constants_predict_again_from_rows():
    trained = constants.Trained(made := list(rows("digits")))
    assert trained.steps_behind == pytest.approx(SLOWER, abs=0.03)
    elements = ElementStatistics(4000, len(penalties._QUANTISERS))
    elements.load_state_dict(made[0]["elements"][0])
    expected = {name: penalties.predict(elements, name, 100) for name in SLOWER}
    assert trained.predicted() == pytest.approx(expected)
    before = formulas._LOSS_FACTOR
    with constants.setting(formulas, "_LOSS_FACTOR", before / 2):
        other = trained.predicted()
    assert before == formulas._LOSS_FACTOR
    assert other["topk:0.1"] == pytest.approx(expected["topk:0.1"] / 2, rel=1e-6)


def test_constants_tell_what_a_choice_costs():
    """Where links take no time nothing is lost by dense; where they are slow, something else is chosen."""
    trained, slow = constants.Trained(list(rows("digits"))), constants.network_of("10mbit/0us")
    assert trained.regret(constants.network_of("10gbit/0us"), 0.7)[1] == 0
    regret, lost = trained.regret(slow, 0.7)
    seconds = {name: constants.seconds_of(name, trained.numel, slow) for name in SLOWER}
    real = {name: (0.005 + took) / (1 - trained.steps_behind[name]) for name, took in seconds.items()}
    chosen = min(real, key=lambda name: abs(max(0.0, trained.steps_behind[name]) - lost))
    assert regret == pytest.approx(real[chosen] / min(real.values()) - 1, abs=1e-6)


@pytest.mark.slow
def test_constants_leave_each_task_out_and_gain_by_parts():
    found = constants.left_out([constants.Trained(list(rows(*of))) for of in (("digits", 0.3), ("text-lstm", 0.1))])
    assert [row["left out"] for row in found] == ["digits", "text-lstm"]
    means = [row["mean"] for row in constants.parts()]
    assert means == sorted(means, reverse=True)
    assert 0 <= means[-1] < 0.001


def test_updates_table_has_the_best_rate_of_most_seeds():
    same = {"task": "digits", "steps": 5, "sent_less": 1.0, "wire_less": 1.0, "losses": [1.0] * 5}  # of accuracies
    qualities = {
        ("gradients", 1.0): (0.70, 0.72),
        ("gradients", 2.0): (0.80, 0.80),
        ("topk", 1.0): (0.60, 0.66),
        ("topk", 2.0): (0.99,),
    }
    made = [
        same | {"arm": arm, "rate": rate, "seed": seed, "quality": quality}
        for (arm, rate), of_seeds in qualities.items()
        for seed, quality in enumerate(of_seeds)
    ]
    gradients, topk = update_exchanges.table(made)
    assert (gradients["rate"], gradients["above"], topk["rate"], topk["seeds"]) == (2.0, 0, 1.0, 2)
    assert (topk["quality"], topk["above"]) == pytest.approx((0.63, -21.25))


def test_updates_make_each_row_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    words = ["--task", "digits", "--steps", "3", "--rates", "1", "--arms", "gradients,demo-side-16", "--rows"]
    for _ in range(2):
        assert update_exchanges.run(update_exchanges.parser().parse_args([*words, str(path)])) == 0
    gradients, demo = (json.loads(line) for line in path.read_text().splitlines())
    assert (gradients["arm"], demo["arm"]) == ("gradients", "demo-side-16")
    assert demo["wire_less"] > 60
