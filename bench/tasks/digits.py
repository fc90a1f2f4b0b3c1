"""Hand-written digits: a small convolutional network, trained in seconds."""

from __future__ import annotations

import os
import pickle
import zipfile

import numpy as np
import torch
from mpicomp.bench.tasks.sampling import Sampler, evenly, seeded
from mpicomp.bench.tasks.task import Task
from torch import nn
from torch.nn import functional

from mpicomp.registry import register

# The split is the task's, not the run's: accuracies of different seeds are measured on the same images.
_SPLIT_SEED = 1797
_HELD_OUT = 0.25  # share of the held-out samples


@register
class Digits(Task):
    """Classify the 1,797 images of 8 x 8 pixels that come with scikit-learn; quality is held-out accuracy.

    A quarter of the images is held out. The network has two convolutions and two linear layers, 38 thousand parameters.
    A user's data is an ``.npz`` file with ``x`` of shape (n, h, w),
    (n, c, h, w) or (n, features), which get a network of linear layers, and ``y`` with n integer labels.

    >>> task = Digits(seed=0)
    >>> images, labels = task.batch(step=0, rank=1, ranks=4)
    >>> tuple(images.shape)
    (32, 1, 8, 8)
    """

    name = "digits"
    quality_name = "held-out accuracy"
    better = "higher"
    steps = 200
    clip = None
    glance = 1.0
    batch_size = 32

    def __init__(self, seed: int = 0, data: str | os.PathLike[str] | None = None) -> None:
        self.seed = seed
        x, labels = self.images() if data is None else _load(self.name, os.fsdecode(data))
        classes, y = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"{self.name}: labels must hold at least 2 classes, got {len(classes)}")
        held_out = int(len(x) * _HELD_OUT)
        if held_out < 1 or len(x) - held_out < self.batch_size:
            least = next(n for n in range(10**6) if n - int(n * _HELD_OUT) >= self.batch_size)
            raise ValueError(
                f"{self.name}: {len(x)} samples are too few for a held-out quarter and a batch of "
                f"{self.batch_size}: at least {least} are needed"
            )
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(x))
        train, test = order[held_out:], order[:held_out]

        x = x.astype(np.float32)
        if x.ndim == 3:
            x = x[:, None]
        # Pixels share one scale; features of a table have each their own.
        axes = 0 if x.ndim == 2 else None
        mean, deviation = x[train].mean(axes), x[train].std(axes)
        x = (x - mean) / np.where(deviation > 0, deviation, 1)

        self.classes = len(classes)
        self._shape = x.shape[1:]
        self._train = torch.from_numpy(x[train]), torch.from_numpy(y[train])
        self._test = torch.from_numpy(x[test]), torch.from_numpy(y[test])
        self._sampler = Sampler(self.name, len(train), self.batch_size, seed)

    def images(self) -> tuple[np.ndarray, np.ndarray]:
        """Return images and labels that a user's data replace."""
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{self.name}: the images come with scikit-learn: pip install 'mpicomp[bench]'"
            ) from error
        bunch = load_digits()
        return bunch.images, bunch.target

    def model(self) -> nn.Module:
        with seeded(self.seed):
            if len(self._shape) == 1:
                return nn.Sequential(
                    nn.Linear(self._shape[0], 256),
                    nn.ReLU(),
                    nn.Linear(256, 64),
                    nn.ReLU(),
                    nn.Linear(64, self.classes),
                )
            return nn.Sequential(
                nn.Conv2d(self._shape[0], 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                # Adaptive, so that images of any size meet the same linear layers.
                nn.AdaptiveMaxPool2d(4),
                nn.Flatten(),
                nn.Linear(512, 64),
                nn.ReLU(),
                nn.Linear(64, self.classes),
            )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=8e-3)

    def batch(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.from_numpy(self._sampler.indices(step, rank, ranks))
        return self._train[0][indices], self._train[1][indices]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        device = next(model.parameters()).device
        images, labels = batch
        return functional.cross_entropy(model(images.to(device)), labels.to(device))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, share: float = 1.0) -> float:
        device = next(model.parameters()).device
        training = model.training
        model.eval()
        images, labels = self._test
        indices = torch.from_numpy(evenly(len(labels), share))
        right = 0
        # In pieces, since a user's data may be large.
        for start in range(0, len(indices), 1024):
            piece = indices[start : start + 1024]
            right += int((model(images[piece].to(device)).argmax(1).cpu() == labels[piece]).sum())
        model.train(training)
        return right / len(indices)


def _load(task: str, path: str) -> tuple[np.ndarray, np.ndarray]:
    expected = "expected an .npz file with arrays x and y"
    if not os.path.exists(path):
        raise ValueError(f"{task}: data: {path!r} does not exist; {expected}")
    try:
        # Opened here, since NumPy leaves a broken archive open. Pickles stay refused.
        with open(path, "rb") as file:
            archive = np.load(file)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array without a name")
            missing = [key for key in ("x", "y") if key not in archive]
            if missing:
                raise ValueError(f"it lacks {' and '.join(missing)} and holds {', '.join(archive.files) or 'nothing'}")
            x, y = archive["x"], archive["y"]
    except (OSError, ValueError, EOFError, TypeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{task}: data: cannot read {path!r} ({reason}); {expected}") from error
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{task}: data: x must be numbers, got dtype {x.dtype}")
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:]:
        raise ValueError(f"{task}: data: x must have shape (n, h, w), (n, c, h, w) or (n, features), got {x.shape}")
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(f"{task}: data: y must be n integer labels, got dtype {y.dtype} of shape {y.shape}")
    if len(x) != len(y):
        raise ValueError(f"{task}: data: x and y must be equally long, got {len(x)} samples and {len(y)} labels")
    if not np.isfinite(x).all():
        raise ValueError(f"{task}: data: x must be finite, it holds NaN or infinity")
    return x, y
