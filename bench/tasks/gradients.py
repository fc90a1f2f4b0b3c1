"""The gradients that a task's training goes through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from mpicomp.bench.tasks.task import Task
from mpicomp.bench.tasks.updating import Updater
from numpy.typing import NDArray


def gradients_of(task: Task) -> Iterator[NDArray[np.float32]]:
    """Train a task by itself, without compression, and return each step's gradient.

    Parameters
    ----------
    task : Task
        With its own model, batches and optimiser. A schedule is that of the steps for which the task was tuned.

    Yields
    ------
    array, shape (parameters,)
        All parameters' gradients, one after the other; overwritten by the next step's.
    """
    model = task.model()
    optimizer = task.optimizer(model)
    updater = Updater(task, optimizer, task.steps)
    parameters = list(model.parameters())
    flat = np.zeros(sum(parameter.numel() for parameter in parameters), np.float32)
    for step in itertools.count():
        optimizer.zero_grad()
        task.loss(model, task.batch(step, 0, 1)).backward()  # type: ignore[no-untyped-call]
        place = 0
        for parameter in parameters:
            if parameter.grad is not None:
                flat[place : place + parameter.numel()] = parameter.grad.numpy().reshape(-1)
            place += parameter.numel()
        yield flat
        updater.update()
