"""The protocol of training tasks: data, model, loss, optimizer and quality, for the loop that trains."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from mpicomp.registry import Registry

if TYPE_CHECKING:  # the protocol is read by code that must not load torch
    import torch


@runtime_checkable
class Task(Protocol):
    """Data, model, loss, optimizer and held-out measurement of one training problem.

    Everything follows from the task's name, its seed and the user's data, so ranks agree without a message.
    """

    kind: ClassVar[str] = "task"
    name: str  # name in the registry
    quality_name: str  # name of the quality that `evaluate` returns, in words
    better: Literal["higher", "lower"]  # direction in which the quality improves
    steps: int  # number of steps for which the optimizer was tuned
    batch_size: int  # samples a rank sees in a step
    clip: float | None
    """Largest L2 norm of the averaged gradient, applied between exchange and update; None for no clipping."""
    glance: float  # share of the held-out samples that suffices to follow the quality during training

    def model(self) -> torch.nn.Module:
        """Return a new model, initialized from the seed: the same bits on every rank."""
        ...

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer with the setting tuned for dense exchange."""
        ...

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the schedule of the optimizer's rate over ``steps``; None for a constant rate."""
        return None

    def batch(self, step: int, rank: int, ranks: int) -> Any:
        """Return the samples of one rank in one step; no sample goes to two ranks of a step.

        Where the data cannot give every rank a batch a ValueError is raised, on all ranks.
        """
        ...

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss of the model on a batch, ready for backward."""
        ...

    def evaluate(self, model: torch.nn.Module, share: float = 1.0) -> float:
        """Return the quality on a share of the held-out data, always the same samples; the model is not changed."""
        ...


TASKS: Registry[Any] = Registry("task", ["mpicomp.bench.tasks"], key="name")


def list_tasks() -> list[str]:
    """Return the names that `get_task` knows; loads torch.

    >>> list_tasks()
    ['digits', 'text-gpt', 'text-lstm']
    """
    try:
        return TASKS.names()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("tasks need PyTorch") from error


def get_task(name: str, seed: int = 0, data: str | os.PathLike[str] | None = None) -> Task:
    """Load a training task, one of `list_tasks()`, with the user's own data.

    The seed decides the initial model and the order of the samples; not the split into training and held-out data.

    >>> get_task("digit")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mpicomp.errors.UnknownNameError: task: unknown name 'digit'; did you mean 'digits'? Known: digits, ...
    """
    if seed < 0:
        raise ValueError(f"train: seed must be 0 or larger, got {seed}")
    list_tasks()
    task: Task = TASKS.cls(name)(seed=seed, data=data)
    return task
