"""The study of how far compressed training is behind: its estimates, against trainings that are made of known parts."""

import json

import behind
import numpy as np
import pytest

from mpicomp.policies.elements import Elements, ElementSurvey

pytest.importorskip("torch")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_a_training_that_is_slower_by_a_share_is_behind_by_that(share):
    steps = np.arange(200)
    noise = np.random.default_rng(0).normal(scale=0.2, size=200)  # of batches, which are the same

    def losses(done):
        return np.exp(2 - 0.02 * done + noise)

    assert behind.steps_behind(losses(steps), losses((1 - share) * steps)) == pytest.approx(share, abs=0.03)


def test_what_is_predicted_of_an_exchange():
    elements = Elements(4000, 2)
    surveys = [ElementSurvey(4000, [behind.exchange_of(name)[0] for name in ("qsgd", "onebit")]) for _ in range(4)]
    random = np.random.default_rng(0)
    assert behind.predict(elements, "topk:0.1", 100) is None
    for step in range(30):
        gradients = random.standard_normal((4, 4000)).astype(np.float32) + np.float32(0.3)
        elements.observe(np.array([s.measure(g, None, (4000,), step) for s, g in zip(surveys, gradients, strict=True)]))
    told = {name: behind.predict(elements, name, 100) for name in ("topk:0.3", "topk:0.1", "qsgd", "powersgd")}
    assert told["powersgd"] is None
    assert 0 <= told["topk:0.3"] < told["topk:0.1"] < 1
    assert 0 <= told["qsgd"] < told["topk:0.1"]
    assert told["topk:0.1"] < behind.predict(elements, "topk:0.1:star-topk", 100)


@pytest.mark.slow
def test_a_row_is_made_once(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = ["--steps", "24", "--exchange", "topk:0.05", "--rows", str(path)]
    for _ in range(2):
        assert behind.run(behind.parser().parse_args(words)) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["exchange"] for row in rows] == ["dense", "topk:0.05"]
    assert rows[0]["delay"] == 0.0
    assert 0 < rows[0]["predicted"]["topk:0.05"] < 1
    assert "topk:0.05" in capsys.readouterr().out
