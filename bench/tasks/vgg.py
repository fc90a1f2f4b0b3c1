"""Digits in a VGG-like network: nearly all computation in its first layers, nearly all parameters in its last."""

from __future__ import annotations

import itertools
import os

import torch
from mpicomp.bench.tasks.digits import Digits
from mpicomp.bench.tasks.updating import seeded
from torch import nn

from mpicomp.registry import register

_SIDE = 32  # pixels of a side to which images are scaled up
_WIDTH = 1024  # units of a hidden linear layer


@register
class VGG(Digits):
    """Classify the digits, enlarged to 32 x 32 pixels, by six convolutions and three linear layers.

    Three blocks of two convolutions with 32, 64 and 128 channels take most of the time; the linear layers, which
    backward reaches first, hold 3.2 of the 3.4 million parameters. There is much to be sent early, and much to be
    computed while it is under way. The optimizer's setting is explained in TUNING.md.
    """

    name = "vgg"
    steps = 60
    batch_size = 64

    def __init__(self, seed: int = 0, data: str | os.PathLike[str] | None = None) -> None:
        super().__init__(seed, data)
        if len(self._shape) == 1:
            raise ValueError("vgg: data: x must be images of shape (n, h, w) or (n, c, h, w); digits takes features")

    def model(self) -> nn.Module:
        channels = [self._shape[0], 32, 64, 128]
        layers: list[nn.Module] = [nn.Upsample(size=(_SIDE, _SIDE), mode="bilinear")]
        with seeded(self.seed):
            for before, after in itertools.pairwise(channels):
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
                layers += [nn.Conv2d(after, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            last = (_SIDE // 8) ** 2 * channels[-1]
            layers += [nn.Flatten(), nn.Linear(last, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
            layers.append(nn.Linear(_WIDTH, self.classes))
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
