"""Ranks that exchange what their optimizers have changed, and the same made by hand."""

import numpy as np
import torch

import mpicomp
from mpicomp.transport import LocalWorld

TRUTH = np.random.default_rng(11).normal(size=(9, 7))


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.Tanh(), torch.nn.Linear(12, 7)).to(dtype)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, rank, step):
    inputs = np.random.default_rng([rank, step]).normal(size=(6, 9))
    dtype = next(model.parameters()).dtype
    return (model(torch.from_numpy(inputs).to(dtype)) - torch.from_numpy(inputs @ TRUTH).to(dtype)).square().mean()


def values(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double().numpy()


def bits(model):
    return b"".join(parameter.detach().view(torch.uint8).numpy().tobytes() for parameter in model.parameters())


class Ranks:
    def __init__(self, size, base=adam, make=network, **settings):
        settings = {"warmup": 0} | settings
        self.world = LocalWorld(size)
        self.models = [make() for _ in range(size)]
        self.optimizers = [
            mpicomp.torch.UpdateOptimizer(base(model), model.named_parameters(), comm=end, **settings)
            for model, end in zip(self.models, self.world.transports, strict=True)
        ]

    def backward(self, number):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()

    def exchange(self):
        return self.world.run([optimizer.rounds() for optimizer in self.optimizers])

    def step(self, number):
        self.backward(number)
        return self.exchange()

    def values(self):
        return [values(model) for model in self.models]

    def residuals(self):
        return [
            np.concatenate([own.reducer.residual(name).reshape(-1) for name in own.shared()]).astype(np.float64)
            for own in self.optimizers
        ]


class ByHand:
    """The same with plain optimizers: each rank's model begins at the shared parameters and makes some steps."""

    def __init__(self, size, base=adam, make=network):
        self.models = [make() for _ in range(size)]
        self.optimizers = [base(model) for model in self.models]
        self.shared = values(self.models[0])

    def step(self, number):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()

    def changes(self):
        return [values(model) - self.shared for model in self.models]

    def set(self, rank, flat):
        place = 0
        with torch.no_grad():
            for parameter in self.models[rank].parameters():
                part = torch.from_numpy(flat[place : place + parameter.numel()])
                parameter.copy_(part.view(parameter.shape))
                place += parameter.numel()

    def set_all(self, flat):
        self.shared = flat
        for rank in range(len(self.models)):
            self.set(rank, flat)
