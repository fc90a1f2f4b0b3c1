import numpy as np
import pytest
import torch
from mpicomp.bench.tasks import get_task

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def task():
    return get_task("digits", seed=1)


def train(task, steps, ranks=1):
    model = task.model()
    optimizer = task.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        sum(task.loss(model, task.batch(step, rank, ranks)) / ranks for rank in range(ranks)).backward()
        optimizer.step()
    return model


def test_split_does_not_follow_the_seed(task):
    other = get_task("digits", seed=2)
    assert torch.equal(task._test[0], other._test[0])
    held_out = {image.numpy().tobytes() for image in task._test[0]}
    assert not held_out & {image.numpy().tobytes() for image in task._train[0]}


def test_share_is_evaluated_on_even_images(task):
    model = train(task, 20)
    images, labels = (held_out[::64] for held_out in task._test)
    assert len(labels) == 8  # of 449, 64 apart
    right = [int(model(image[None]).argmax()) == int(label) for image, label in zip(images, labels, strict=True)]
    assert task.evaluate(model, 8 / 449) == np.mean(right)
    assert task.evaluate(model, 1e-9) in (0, 1)  # one image


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 13, 10), (5, 2), (30,)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_users_arrays(tmp_path, shape, dtype):
    generator = np.random.default_rng(0)
    y = generator.choice([-3, 7, 9], 400)
    x = generator.normal(128, 10, (400, *shape)) + 20 * y.reshape(-1, *[1] * len(shape))
    np.savez(tmp_path / "data.npz", x=x.clip(0, 255).astype(dtype), y=y)
    task = get_task("digits", data=tmp_path / "data.npz")
    assert task.classes == 3
    assert task.evaluate(train(task, 20)) > 0.6


X, Y = np.zeros((100, 8, 8)), np.arange(100) % 10


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "lacks y and holds x.; expected an .npz file with arrays x and y"),
        ({"images": X}, "lacks x and y and holds images"),
        ({"x": X, "y": Y[:-1]}, "x and y must be equally long, got 100 samples and 99 labels"),
        ({"x": X, "y": Y * 1.0}, "y must be n integer labels, got dtype float64"),
        ({"x": X, "y": Y.astype(str)}, "y must be n integer labels, got dtype"),
        ({"x": X, "y": Y[:, None]}, r"y must be n integer labels, got dtype int64 of shape \(100, 1\)"),
        ({"x": X.astype(str), "y": Y}, "x must be numbers"),
        ({"x": X.astype(object), "y": Y}, "cannot read .* expected an .npz"),
        ({"x": X[:, 0, 0], "y": Y}, r"x must have shape .*, got \(100,\)"),
        ({"x": X[:, :0], "y": Y}, r"x must have shape .*, got \(100, 0, 8\)"),
        ({"x": X + np.nan, "y": Y}, "x must be finite"),
        ({"x": X, "y": Y * 0}, "at least 2 classes, got 1"),
        ({"x": X[:41], "y": Y[:41]}, "41 samples are too few .* batch of 32: at least 42 are needed"),
        ({"x": X[:0], "y": Y[:0]}, "at least 2 classes, got 0"),
    ],
)
def test_bad_arrays(tmp_path, arrays, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match="^digits: .*" + message) as error:
        get_task("digits", data=tmp_path / "data.npz")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 broken", "array", "folder"])
def test_bad_files(tmp_path, content):
    path = tmp_path / "data.npz"
    if content == "array":
        with path.open("wb") as file:
            np.save(file, X)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^digits: data: .*expected an \.npz file with arrays x and y") as error:
        get_task("digits", data=path)
    assert "\n" not in str(error.value)
