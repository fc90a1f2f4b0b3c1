"""The end of a step, when the gradient is averaged: clipping, the update, the next step's rate."""

from __future__ import annotations

from typing import Any

import torch
from mpicomp.bench.tasks.task import Task


class Updater:
    """Updates a model as its task wants it."""

    def __init__(self, task: Task, optimizer: Any, steps: int) -> None:
        self._optimizer = optimizer
        self._clip = task.clip
        self._schedule = task.schedule(optimizer, steps)

    def update(self) -> None:
        """Clip the gradients, which must be the mean over ranks by now, do the step, and set the rate of the next."""
        if self._clip is not None:
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip)
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Return where in the schedule the training is; what the optimizer has is not among it."""
        return {} if self._schedule is None else self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the optimizer's own."""
        if self._schedule is not None:
            self._schedule.load_state_dict(state)


def plain(optimizer: torch.optim.Optimizer) -> torch.optim.SGD:
    """Return plain gradient descent with the parameters and the rates of an optimizer's groups."""
    return torch.optim.SGD([{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups])
