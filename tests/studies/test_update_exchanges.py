"""The study of exchanges of updates."""

import json

import pytest
from study_jobs import call

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

import update_exchanges  # noqa: E402


def test_updates_table_has_the_best_rate_of_most_seeds():
    same = {"task": "digits", "steps": 5, "sent_less": 1.0, "wire_less": 1.0}
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
    words = ["--task", "digits", "--steps", "3", "--rates", "1", "--arms", "gradients,muon-onebit-every-1", "--rows"]
    for _ in range(2):
        assert call(update_exchanges.STUDY, [*words, str(path)]) == 0
    gradients, muon = (json.loads(line) for line in path.read_text().splitlines())
    assert (gradients["arm"], muon["arm"]) == ("gradients", "muon-onebit-every-1")
    assert muon["wire_less"] > 25
