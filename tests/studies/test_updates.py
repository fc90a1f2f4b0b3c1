"""The study of exchanges of updates: its trainings, against loops that are written out, and its table."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

import updates  # noqa: E402, it needs torch
from mpicomp.bench.tasks import get_task  # noqa: E402, some tasks do

RANKS = 4


def ended(monkeypatch, arm, rate, steps):
    """Train digits as the study does; return its row, and the parameters in the end."""
    found = []
    evaluate = type(get_task("digits")).evaluate

    def look(task, model, *arguments):
        found[:] = [own.detach().clone() for own in model.parameters()]
        return evaluate(task, model, *arguments)

    monkeypatch.setattr(type(get_task("digits")), "evaluate", look)
    monkeypatch.setattr(updates, "ARMS", {"own": arm})
    row = updates.train("digits", "own", rate, 0, steps, "float32", "cpu")
    return row, found


def mean_gradients(task, model, step):
    """Return the mean of all ranks' gradients, and of their losses."""
    losses, sums = [], [torch.zeros_like(own) for own in model.parameters()]
    for rank in range(RANKS):
        model.zero_grad()
        loss = task.loss(model, task.batch(step, rank, RANKS))
        loss.backward()
        losses.append(float(loss.detach()))
        for total, own in zip(sums, model.parameters(), strict=True):
            total += own.grad / RANKS
    return sums, np.mean(losses)


def test_dense_gradients_train_as_one_rank_with_all_batches(monkeypatch):
    row, found = ended(monkeypatch, updates.ARMS["gradients"], 0.5, 4)
    task = get_task("digits", 0)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 * 8e-3)
    losses = []
    for step in range(4):
        means, loss = mean_gradients(task, model, step)
        for own, mean in zip(model.parameters(), means, strict=True):
            own.grad = mean
        optimizer.step()
        losses.append(loss)
    np.testing.assert_allclose(row["losses"], losses, rtol=1e-4)
    for ours, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-4)


def test_demo_moves_along_signs_by_the_rate(monkeypatch):
    """With all coefficients the signs are those of the mean gradient."""
    all_of_them = {"id": "dcttopk", "ratio": 1.0, "side": 16}
    demo = updates.ARMS["demo-side-16"]
    row, found = ended(monkeypatch, updates.Arm(all_of_them, settings=demo.settings, inner=demo.inner), 2.0, 1)
    task = get_task("digits", 0)
    model = task.model()
    means, _ = mean_gradients(task, model, 0)
    for ours, theirs, mean in zip(found, model.parameters(), means, strict=True):
        clear = mean.abs() > 1e-6  # where rounding does not decide the sign
        moved = (ours - theirs.detach())[clear]
        torch.testing.assert_close(moved, -2 * 8e-3 * mean[clear].sign(), rtol=1e-3, atol=1e-7)
    assert row["sent_less"] < 2


def test_what_the_table_tells():
    """The best rate of an arm, of those with most seeds, and its distance from dense gradients at theirs."""
    alike = {"task": "digits", "steps": 5, "sent_less": 1.0, "wire_less": 1.0, "losses": [1.0] * 5}  # of accuracies
    qualities = {
        ("gradients", 1.0): (0.70, 0.72),
        ("gradients", 2.0): (0.80, 0.80),
        ("topk", 1.0): (0.60, 0.66),
        ("topk", 2.0): (0.99,),
    }
    made = [
        alike | {"arm": arm, "rate": rate, "seed": seed, "quality": quality}
        for (arm, rate), of_seeds in qualities.items()
        for seed, quality in enumerate(of_seeds)
    ]
    told = {entry["arm"]: entry for entry in updates.table(made)}
    assert {arm: entry["rate"] for arm, entry in told.items()} == {"gradients": 2.0, "topk": 1.0}
    assert told["gradients"]["above"] == 0
    assert told["topk"]["quality"] == pytest.approx(0.63)
    assert told["topk"]["above"] == pytest.approx(-21.25)
    assert told["topk"]["seeds"] == 2


def test_a_row_is_made_once(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = ["--task", "digits", "--steps", "3", "--rates", "1", "--arms", "gradients,demo-side-16", "--rows"]
    for _ in range(2):
        assert updates.run(updates.parser().parse_args([*words, str(path)])) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["gradients", "demo-side-16"]
    assert rows[1]["wire_less"] > 60
    assert "demo-side-16" in capsys.readouterr().out
