import numpy as np
import pytest
import torch
from mpicomp.bench.tasks import get_task

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def task():
    return get_task("text-lstm", seed=1)


def test_samples_share_no_target(task):
    # The last target of a sample is the first input of the next one, and only there.
    assert (task._train[0][-1], task._train[1][-1]) == (task._train[1][0], task._train[2][0])


def test_share_is_evaluated_on_even_samples(task):
    model = task.model()
    with torch.no_grad():
        losses = [float(task.loss(model, torch.from_numpy(row[None].astype(np.int64)))) for row in task._test[::93]]
    assert len(losses) == 12  # 1023 is 11 times 93
    assert task.evaluate(model, 12 / 1024) == pytest.approx(np.mean(losses), rel=1e-5)
    assert task.evaluate(model, task.glance) == pytest.approx(task.evaluate(model), rel=0.02)


@pytest.mark.parametrize("folder", [False, True])
def test_users_text(tmp_path, folder):
    lines = [f"line {number} of the text\n" for number in range(4000)]
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("".join(lines[number::40]))
    (tmp_path / "all").write_text("".join(lines))
    task = get_task("text-lstm", data=tmp_path if folder else tmp_path / "all")
    assert task.tokens < 400
    model = task.model()
    assert task.loss(model, task.batch(0, 0, 1)).item() > 0
    assert task.evaluate(model) > 0


def test_short_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("too short\n")
    with pytest.raises(ValueError, match=r"text-lstm: too short a text: .* at least 161 and 21 are needed"):
        get_task("text-lstm", data=tmp_path)
