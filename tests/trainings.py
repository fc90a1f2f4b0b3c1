"""Trainings under simulated networks: gradients with long tails, some of which is signal."""

import numpy as np
from worlds import Ranks

SHAPES = {"embedding": (300, 40), "weight": (64, 50), "bias": (64,)}


class Adam:
    """First and second moments of Adam, element by element; b1 is 0.9 and b2 0.999."""

    def __init__(self):
        self.first, self.second, self.steps = 0.0, 0.0, 0

    def step(self, gradient):
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        return self.first / (1 - 0.9**self.steps) / np.sqrt(self.second / (1 - 0.999**self.steps) + 1e-30)


class Training:
    """Ranks that reduce gradients with long tails; there is a step's worth of computing between two of them.

    A share of their energy is the same on all ranks and in all steps, the rest is noise.
    """

    def __init__(self, size, network, *args, computing=0.02, signal=0.02, shapes=SHAPES, **settings):
        self.signal = signal
        self.ranks = Ranks(size, *args, network=network, **settings)
        self.random = np.random.default_rng(1)
        self.computing = computing
        self.scale = {name: self.random.pareto(3, shape) for name, shape in shapes.items()}
        self.common = {name: scale * self.random.standard_normal(scale.shape) for name, scale in self.scale.items()}

    def gradients(self):
        def one(name, scale):
            noise = scale * self.random.standard_normal(scale.shape)
            return (self.signal**0.5 * self.common[name] + (1 - self.signal) ** 0.5 * noise).astype(np.float32)

        return [{name: one(name, scale) for name, scale in self.scale.items()} for _ in self.ranks.reducers]

    def step(self, lr=0.1):
        for end in self.ranks.world.transports:
            end.seconds += self.computing
        gradients = self.gradients()
        known = self.ranks.reducers[0].last_step is not None
        before = {name: self.ranks.residual_sum(name) for name in self.scale if known}
        means = self.ranks.reduce(gradients, lr)
        records = [[b.to_json() for b in reducer.last_step.buckets] for reducer in self.ranks.reducers]
        plans = [[(b["collective"], b["compressor"], b["reason"], b["gain"]) for b in buckets] for buckets in records]
        assert all(plan == plans[0] for plan in plans)
        for name in self.scale:
            assert all((mean[name] == means[0][name]).all() for mean in means)
            total = np.sum([arrays[name].astype(np.float64) for arrays in gradients], axis=0) + before.get(name, 0)
            after_step = len(means) * means[0][name].astype(np.float64) + self.ranks.residual_sum(name)
            np.testing.assert_allclose(after_step, total, rtol=1e-4, atol=1e-3)
        return self.ranks.reducers[0].last_step.buckets

    def run(self, steps, lr=0.1):
        return [self.step(lr) for _ in range(steps)]
