"""Parts of trainings that tasks share: initialization from a seed, learning rates, and the end of a step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
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
        """Return the place in the schedule, without the optimizer's state."""
        return {} if self._schedule is None else self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of `state_dict`, after the optimizer's own."""
        if self._schedule is not None:
            self._schedule.load_state_dict(state)


_WARM_UP = 0.1  # share of the steps in which the rate rises
_LAST = 0.1  # share of the rate that is left in the last step


def warm_up_and_cosine(step: int, steps: int) -> float:
    """Return the share of the rate in a step: it rises linearly to all of it, and falls on a cosine to a tenth.

    >>> [warm_up_and_cosine(step, 20) for step in (0, 1, 10, 19)]
    [0.5, 1.0, 0.55, 0.1]
    """
    warm_up = max(1, round(_WARM_UP * steps))
    done = min(step + 1, steps)
    if done <= warm_up:
        return done / warm_up
    fallen = (done - warm_up) / (steps - warm_up)
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * fallen)) / 2


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw torch's CPU random numbers from a seed inside the block, and restore a user's generator after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
