"""Models with an optimizer each, which step together."""

import torch

from mpicomp.transport import LocalWorld


class Replicas:
    """N models with an optimizer of a kind each, that step together in one process."""

    def __init__(self, kind, make, ranks, **settings):
        self.world = LocalWorld(ranks)
        self.models = [make() for _ in range(ranks)]
        self.optimizers = [
            kind(model.named_parameters(), comm=end, **settings)
            for model, end in zip(self.models, self.world.transports, strict=True)
        ]

    def step(self):
        with torch.no_grad():
            self.world.run([optimizer.rounds() for optimizer in self.optimizers])

    def train(self, loss_of, steps):
        """Give the mean loss of every step; ``loss_of`` gets a model, a rank and a step."""
        losses = []
        for step in steps:
            total = 0.0
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                total += loss.item()
            self.step()
            losses.append(total / len(self.models))
        return losses

    def bits(self):
        return [b"".join(p.detach().numpy().tobytes() for p in model.parameters()) for model in self.models]
