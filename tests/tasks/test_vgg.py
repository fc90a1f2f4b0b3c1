import numpy as np
import pytest
import torch
from mpicomp.bench.tasks import get_task

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def task():
    return get_task("vgg", seed=1)


def train(task, steps, ranks=1):
    model = task.model()
    optimizer = task.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (task.loss(model, task.batch(step, rank, ranks)) / ranks).backward()
        optimizer.step()
    return model


def test_first_layers_are_small_and_last_ones_huge(task):
    parameters = list(task.model().parameters())
    numels = [parameter.numel() for parameter in parameters]
    assert 2_500_000 < sum(numels) < 6_000_000
    convolutions = [parameter.numel() for parameter in parameters if parameter.ndim == 4]
    assert convolutions == sorted(convolutions)
    assert sum(convolutions) < sum(numels) / 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_well_in_as_many_steps_as_it_is_tuned_for(task):
    assert task.evaluate(train(task, task.steps, ranks=4)) > 0.9


def test_images_of_ones_own(tmp_path):
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 200)
    np.savez(tmp_path / "data.npz", x=generator.normal(size=(200, 3, 13, 10)) + y[:, None, None, None], y=y)
    task = get_task("vgg", data=tmp_path / "data.npz")
    assert torch.isfinite(task.loss(task.model(), task.batch(0, 0, 2)))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((200, 5)), "vgg: data: x must be images of shape"),
        (np.full((200, 8, 8), np.nan), "vgg: data: x must be finite"),
    ],
)
def test_data_without_images_is_refused(x, text, tmp_path):
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(200) % 2)
    with pytest.raises(ValueError, match=text):
        get_task("vgg", data=tmp_path / "data.npz")
