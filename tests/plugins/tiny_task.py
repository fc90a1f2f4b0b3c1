"""A training task in one file, as a user would write one: a plane through points."""

import torch
from mpicomp.bench.tasks import Task

import mpicomp


@mpicomp.register
class Plane(Task):
    """Linear regression on points that are drawn from the step and the rank."""

    name = "plane"
    quality_name = "mean squared error"
    better = "lower"
    steps = 20
    batch_size = 8
    clip = None
    glance = 1.0

    def __init__(self, seed=0, data=None):
        self.seed = seed

    def model(self):
        torch.manual_seed(self.seed)
        return torch.nn.Linear(40, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.02)

    def batch(self, step, rank, ranks):
        return self._points(1 + step * ranks + rank)

    def loss(self, model, batch):
        points, heights = batch
        return torch.nn.functional.mse_loss(model(points), heights)

    def evaluate(self, model, share=1.0):
        with torch.no_grad():
            return self.loss(model, self._points(0)).item()

    def _points(self, number):
        points = torch.randn(self.batch_size, 40, generator=torch.Generator().manual_seed(number))
        return points, points.sum(dim=1, keepdim=True)
