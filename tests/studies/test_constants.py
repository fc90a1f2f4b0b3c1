"""The study of the constants of the joint choice, on trainings that are made of known parts."""

import behind
import constants
import numpy as np
import pytest

from mpicomp.policies import behind as formulas
from mpicomp.policies.elements import Elements, ElementSurvey

pytest.importorskip("torch")

SLOWER = {"topk:0.1": 0.1, "topk:0.01": 0.4, "qsgd": 0.0}


def rows(task, seed=0, signal=0.3):
    """Give rows of trainings that are slower by known shares."""
    elements, random, steps = Elements(4000, 2), np.random.default_rng(seed), np.arange(200)
    surveys = [ElementSurvey(4000, [behind.exchange_of(name)[0] for name in ("qsgd", "onebit")]) for _ in range(4)]
    for step in range(30):
        gradients = random.standard_normal((4, 4000)).astype(np.float32) + np.float32(signal)
        elements.observe(np.array([s.measure(g, None, (4000,), step) for s, g in zip(surveys, gradients, strict=True)]))
    alike = {"task": task, "seed": seed, "steps": 200}
    yield alike | {
        "exchange": "dense",
        "losses": np.exp(2 - 0.02 * steps),
        "elements": [{"step": 100, **elements.state()}],
    }
    for name, share in SLOWER.items():
        yield alike | {"exchange": name, "losses": np.exp(2 - 0.02 * (1 - share) * steps), "elements": []}


def test_predictions_are_made_anew_from_rows():
    made = list(rows("digits"))
    trained = constants.Trained(made)
    assert trained.behind == pytest.approx(SLOWER, abs=0.03)
    elements = Elements(4000, 2)
    elements.give(made[0]["elements"][0])
    expected = {name: behind.predict(elements, name, 100) for name in SLOWER}
    assert trained.predicted() == pytest.approx(expected)
    before = formulas._FACTOR_OF_SELECTIONS
    with constants.setting(formulas, "_FACTOR_OF_SELECTIONS", before / 2):
        other = trained.predicted()
    assert before == formulas._FACTOR_OF_SELECTIONS
    assert other["qsgd"] == expected["qsgd"]
    assert other["topk:0.1"] == pytest.approx(expected["topk:0.1"] / 2, rel=1e-6)


def test_what_a_choice_costs():
    """Where links take no time nothing is lost by dense; where they are slow, something else is chosen."""
    trained = constants.Trained(list(rows("digits")))
    assert trained.regret(constants.network_of("10gbit/0us"), 0.7)[1] == 0
    regret, lost = trained.regret(constants.network_of("10mbit/0us"), 0.7)
    seconds = {name: constants.seconds_of(name, trained.numel, constants.network_of("10mbit/0us")) for name in SLOWER}
    real = {name: (0.005 + own) / (1 - trained.behind[name]) for name, own in seconds.items()}
    chosen = min(real, key=lambda name: abs(max(0.0, trained.behind[name]) - lost))
    assert regret == pytest.approx(real[chosen] / min(real.values()) - 1, abs=1e-6)


def test_each_task_is_left_out_once():
    trained = [constants.Trained(list(rows(task, signal=own))) for task, own in (("digits", 0.3), ("text-lstm", 0.1))]
    found = constants.left_out(trained)
    assert [row["left out"] for row in found] == ["digits", "text-lstm"]
    assert all(row["error"] >= 0 and row["as they are"] >= 0 for row in found)


def test_the_more_parts_the_nearer_to_the_best():
    means = [row["mean"] for row in constants.parts()]
    assert means == sorted(means, reverse=True)
    assert 0 <= means[-1] < 0.001
