"""The rows of the study of estimators, on little data."""

import json

import estimators
import numpy as np
import pytest
from study_jobs import call

from mpicomp.compressors import get_compressor

WORDS = ["--numel", "3000", "--ratio", "0.1", "--steps", "2"]
DATA = ("laplace", "gamma", "normal", "student")


def measured(array, ratios=(0.1, 0.01), feedback=True):
    """Measure on an array of steps; all but those in which estimators adapt are counted."""
    data = estimators.Data(iter(array), feedback)
    return estimators.measure("mine", data, ratios, len(array) - estimators.WARM)


@pytest.fixture(scope="module")
def rows():
    found = []
    for seed, name in enumerate(DATA):
        found += estimators.measure(name, estimators.drawn(name, 4000, seed), (0.1, 0.01), 3)
    return found


def test_estimators_have_a_row_for_each_ratio_and_data(rows):
    names = set(estimators.estimators(0.1))
    assert {"topk"} <= names
    assert {(row["name"], row["data"], row["ratio"]) for row in rows} == {
        (name, data, ratio) for name in names for data in DATA for ratio in (0.1, 0.01)
    }
    assert len(rows) == len(names) * len(DATA) * 2
    for row in rows:
        assert set(row) == set(estimators.ROW)
        assert (row["numel"], row["steps"], row["feedback"]) == (4000, 3, False)
        assert 0 <= row["min"] <= row["mean"] <= row["max"]
        compressor = get_compressor(row["config"])
        assert row["name"].partition(".")[0] == compressor.id
        assert compressor.ratio == row["ratio"]


def test_topk_reaches_its_ratio_exactly(rows):
    found = [*rows, *measured(np.random.default_rng(0).standard_normal((28, 4049)))]
    assert all(row["mean"] == row["min"] == row["max"] == 1 for row in found if row["name"] == "topk")


def test_distributions_have_their_moments():
    drawn = {name: np.abs(next(estimators.drawn(name, 200_000, 0).gradients).astype(np.float64)) for name in DATA}
    # Mean magnitude over root mean square: 1/sqrt(2), shape over sqrt(shape (shape + 1)), sqrt(2/pi), 2/pi for t(3).
    expected = {
        "laplace": 2**-0.5,
        "gamma": 0.6 / (0.6 * 1.6) ** 0.5,
        "normal": (2 / np.pi) ** 0.5,
        "student": 2 / np.pi,
    }
    for name, magnitudes in drawn.items():
        assert magnitudes.mean() / np.sqrt(np.square(magnitudes).mean()) == pytest.approx(expected[name], rel=0.06)
    gamma = next(estimators.drawn("gamma", 200_000, 0).gradients)
    assert (gamma > 0).mean() == pytest.approx(0.5, abs=0.01)


def test_gradients_of_a_task_are_those_of_training():
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from mpicomp.bench.tasks import get_task

    task = get_task("digits", 0)
    model = task.model()
    optimizer = task.optimizer(model)
    recorded = estimators.gradients_of(task)
    for step in range(3):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, 0, 1)).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        np.testing.assert_array_equal(next(recorded), gradient.numpy())
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["digits", "text-lstm"])
@pytest.mark.timeout(300)
def test_sidco_stays_near_its_ratio_on_real_gradients(task, monkeypatch):
    """With error feedback, over 50 steps of a training after 25 in which it adapts."""
    chosen = {f"sidco.{name}": estimators.estimators(1.0)[f"sidco.{name}"] for name in estimators.VARIANTS["sidco"][1]}
    monkeypatch.setattr(
        estimators,
        "estimators",
        lambda ratio: {name: get_compressor(entry.get_config() | {"ratio": ratio}) for name, entry in chosen.items()},
    )
    rows = estimators.measure(task, estimators.trained(task, True), (0.1, 0.01, 0.001), 50)
    assert len(rows) == 9
    for row in rows:
        assert 0.8 <= row["mean"] <= 1.25, row


def test_estimators_print_the_rows_that_they_write(tmp_path, capsys):
    path, mine = tmp_path / "out.json", tmp_path / "mine.npz"
    np.savez(mine, mine=np.random.default_rng(0).standard_normal((27, 500)))
    words = ["--data", "normal,laplace", "--gradients", str(mine), "--json", str(path)]
    assert call(estimators, [*WORDS, *words]) == 0
    written = json.loads(path.read_text())["rows"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(place for place, line in enumerate(lines) if line[:1] == ["name"])
    assert lines[header] == ["name", "data", "ratio", "mean", "min", "max"]
    assert [line[:2] for line in lines[header + 1 :]] == [[row["name"], row["data"]] for row in written]
    assert list(dict.fromkeys(row["data"] for row in written)) == ["normal", "laplace", "mine"]
    assert ["topk", "mine", "0.1", "1.000", "1.000", "1.000"] in lines


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, "holds nothing"),
        ({"g": np.zeros(5)}, "'g' in "),
        ({"g": np.zeros((26, 5))}, "has 26 steps, at least 27 are needed"),
        ({"g": np.full((27, 5), np.nan)}, "holds NaN or infinity"),
    ],
)
def test_gradients_of_other_shapes_are_refused(arrays, text, tmp_path, capsys):
    np.savez(tmp_path / "bad.npz", **arrays)
    assert call(estimators, [*WORDS, "--gradients", str(tmp_path / "bad.npz")]) == 2
    assert text in capsys.readouterr().err
