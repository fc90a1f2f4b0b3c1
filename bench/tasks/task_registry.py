"""Training tasks by name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpicomp.registry import Registry

if TYPE_CHECKING:
    from mpicomp.bench.tasks.task import Task

TASKS: Registry[Any] = Registry("task", ["mpicomp.bench.tasks"], key="name")


def list_tasks() -> list[str]:
    """Return the names that `get_task` knows; loads torch.

    Examples
    --------
    >>> list_tasks()
    ['digits', 'text-gpt', 'text-gpt-10m', 'text-lstm', 'vgg']
    """
    try:
        return TASKS.names()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("train: tasks need PyTorch: pip install 'mpicomp[torch]'") from error


def get_task(name: str, seed: int = 0, data: str | os.PathLike[str] | None = None, shards: bool = False) -> Task:
    """Load a training task.

    Parameters
    ----------
    name : str
        One of `list_tasks()`.
    seed : int
        Decides the initial model and the order of the samples; not the split into training and held-out data.
    data : path, optional
        The user's own data in place of the task's: see the task for its form.
    shards : bool
        Whether every rank draws its samples from a part of its own: see `Task.shard`.

    Raises
    ------
    ValueError
        For an unknown name, a negative seed, data that the task cannot train on, or a task that has no shards.
    ImportError
        When a package that the task needs is not installed.

    Examples
    --------
    >>> get_task("digit")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mpicomp.errors.UnknownNameError: task: unknown name 'digit'; did you mean 'digits'? Known: digits, ...
    """
    if seed < 0:
        raise ValueError(f"train: seed must be 0 or larger, got {seed}")
    list_tasks()
    task: Task = TASKS.cls(name)(seed=seed, data=data)
    if shards:
        task.shard()
    return task
