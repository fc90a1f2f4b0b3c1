"""The rows of ``mpicomp bench estimators``, on little data."""

from itertools import pairwise

import numpy as np
import pytest
from mpicomp.bench import estimators

from mpicomp.compressors import get_compressor

DATA = ("laplace", "gamma", "normal", "student")
FIELDS = {"name", "data", "numel", "ratio", "feedback", "steps", "mean", "min", "max", "config"}


def settings(**changed):
    return estimators.Settings(**{"numel": 4000, "ratios": (0.1, 0.01), "steps": 3, "data": DATA} | changed)


@pytest.fixture(scope="module")
def rows():
    return estimators.measure(settings())


def test_every_estimator_has_a_row_for_every_ratio_and_data(rows):
    names = set(estimators.estimators(0.1))
    assert {"topk"} <= names
    assert {(row["name"], row["data"], row["ratio"]) for row in rows} == {
        (name, data, ratio) for name in names for data in DATA for ratio in (0.1, 0.01)
    }
    assert len(rows) == len(names) * len(DATA) * 2
    for row in rows:
        assert set(row) == FIELDS
        assert (row["numel"], row["steps"], row["feedback"]) == (4000, 3, False)
        assert 0 <= row["min"] <= row["mean"] <= row["max"]
        compressor = get_compressor(row["config"])
        assert row["name"].partition(".")[0] == compressor.id
        assert compressor.ratio == row["ratio"]


def test_variants_are_estimators_of_their_own():
    found = estimators.estimators(0.01)
    for name, (parameter, values) in estimators._VARIANTS.items():
        variants = {label: entry for label, entry in found.items() if entry.id == name}
        if variants:
            assert {label: getattr(entry, parameter) for label, entry in variants.items()} == {
                f"{name}.{value}": value for value in values
            }


@pytest.mark.parametrize("numel", [4000, 4049])
def test_topk_reaches_what_it_is_asked_for(numel):
    gradients = np.random.default_rng(0).standard_normal((estimators.WARM + 3, numel))
    rows = estimators.measure(settings(data=("normal",), numel=numel, recorded={"mine": gradients}))
    for row in rows:
        if row["name"] == "topk":
            assert row["mean"] == row["min"] == row["max"] == 1


def test_real_gradients_come_with_feedback(monkeypatch):
    """What is kept back of the first step alone is selected in the second."""
    gradients = np.zeros((estimators.WARM + 1, 100))
    gradients[0] = np.arange(1, 101)
    kept = []
    before = estimators.Selecting.step

    def step(self, bucket, gradient, message):
        count = before(self, bucket, gradient, message)
        ((_, residual),) = bucket.residuals()
        kept.append(np.count_nonzero(residual))
        return count

    monkeypatch.setattr(estimators.Selecting, "step", step)
    monkeypatch.setattr(estimators, "list_compressors", lambda: ["topk"])
    (row,) = estimators.measure(settings(data=(), ratios=(0.02,), steps=1, recorded={"mine": gradients}))
    assert row["feedback"]
    assert kept[:3] == [98, 96, 94]
    assert all(first - second == 2 for first, second in pairwise(kept))


def test_real_gradients_come_as_they_are_where_that_is_wanted():
    gradients = np.random.default_rng(0).standard_normal((estimators.WARM + 1, 100))
    rows = estimators.measure(settings(data=(), steps=1, recorded={"mine": gradients}, feedback=False))
    assert not any(row["feedback"] for row in rows)


def test_distributions_are_what_they_are_called():
    drawn = {name: np.abs(next(estimators._drawn(name, 200_000, 0)).astype(np.float64)) for name in DATA}
    # Mean magnitude over root mean square: 1/sqrt(2), shape over sqrt(shape (shape + 1)), sqrt(2/pi), 2/pi for t(3).
    expected = {
        "laplace": 2**-0.5,
        "gamma": 0.6 / (0.6 * 1.6) ** 0.5,
        "normal": (2 / np.pi) ** 0.5,
        "student": 2 / np.pi,
    }
    for name, magnitudes in drawn.items():
        assert magnitudes.mean() / np.sqrt(np.square(magnitudes).mean()) == pytest.approx(expected[name], rel=0.06)
    gamma = next(estimators._drawn("gamma", 200_000, 0))
    assert (gamma > 0).mean() == pytest.approx(0.5, abs=0.01)


def test_gradients_of_a_task_are_those_of_its_training():
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from mpicomp.bench.tasks import get_task
    from mpicomp.bench.tasks.gradients import gradients_of

    task = get_task("digits", 0)
    model = task.model()
    optimizer = task.optimizer(model)
    recorded = gradients_of(task)
    for step in range(3):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, 0, 1)).backward()
        own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        np.testing.assert_array_equal(next(recorded), own.numpy())
        optimizer.step()


@pytest.mark.parametrize("task", ["digits", "text-lstm"])
@pytest.mark.timeout(300)
def test_sidco_stays_near_its_ratio_on_real_gradients(task, monkeypatch):
    """With error feedback, over 50 steps of a training after 25 in which it adapts."""
    chosen = {
        name: estimators.estimators(1.0)[name] for name in estimators.estimators(1.0) if name.startswith("sidco.")
    }
    assert len(chosen) == 3
    monkeypatch.setattr(
        estimators,
        "estimators",
        lambda ratio: {name: get_compressor(own.get_config() | {"ratio": ratio}) for name, own in chosen.items()},
    )
    rows = estimators.measure(settings(data=(task,), ratios=(0.1, 0.01, 0.001), steps=50))
    assert len(rows) == 9
    for row in rows:
        assert 0.8 <= row["mean"] <= 1.25, row
