"""Ranks that are simulated in this process: they share one model, and nothing but their exchange differs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from mpicomp.bench.tasks import Task
from mpicomp.bench.tasks.updating import Updater


class SharedModel:
    """The model of a task, with its optimizer, that all ranks compute their gradients with."""

    def __init__(self, task: Task, steps: int) -> None:
        self.task = task
        self.model = task.model()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = task.optimizer(self.model)
        self.updater = Updater(task, self.optimizer, steps)

    def backward(self, step: int, rank: int, ranks: int) -> float:
        """Compute the gradients of a rank's batch, and return its loss."""
        self.model.zero_grad()
        loss = self.task.loss(self.model, self.task.batch(step, rank, ranks))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def gradients(self) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """Return copies of the gradients of the last backward."""
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {name: grad.numpy().copy() for name, grad in grads.items() if grad is not None}

    def set_gradients(self, means: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad.numpy()[...] = means[name]

    def quality(self) -> float:
        return self.task.evaluate(self.model)
