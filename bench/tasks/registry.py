"""Training tasks by name."""

from __future__ import annotations

import difflib
import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicomp.bench.tasks.task import Task

# Module and class, so that a task's imports wait until somebody asks for that task.
_TASKS = {
    "digits": ("mpicomp.bench.tasks.digits", "Digits"),
    "text-lstm": ("mpicomp.bench.tasks.text", "TextLSTM"),
    "vgg": ("mpicomp.bench.tasks.vgg", "VGG"),
}


def list_tasks() -> list[str]:
    """Return the names that `get_task` knows.

    Examples
    --------
    >>> list_tasks()
    ['digits', 'text-lstm', 'vgg']
    """
    return sorted(_TASKS)


def get_task(name: str, seed: int = 0, data: str | os.PathLike[str] | None = None) -> Task:
    """Load a training task.

    Parameters
    ----------
    name : str
        One of `list_tasks()`.
    seed : int
        Decides the initial model and the order of the samples; not the split into training and held-out data.
    data : path, optional
        The user's own data in place of the task's: see the task for its form.

    Raises
    ------
    ValueError
        For an unknown name, a negative seed, or data that the task cannot train on.
    ImportError
        When a package that the task needs is not installed.

    Examples
    --------
    >>> get_task("digit")
    Traceback (most recent call last):
    ValueError: train: unknown task 'digit'; did you mean 'digits'? Known: digits, text-lstm, vgg
    """
    if name not in _TASKS:
        # cutoff 0: even a distant guess names something that exists.
        nearest = difflib.get_close_matches(str(name), _TASKS, n=1, cutoff=0.0)[0]
        known = ", ".join(list_tasks())
        raise ValueError(f"train: unknown task {name!r}; did you mean {nearest!r}? Known: {known}")
    if seed < 0:
        raise ValueError(f"train: seed must be 0 or larger, got {seed}")
    module, factory = _TASKS[name]
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"train: task {name!r} needs PyTorch: pip install 'mpicomp[torch]'") from error
    task: Task = getattr(loaded, factory)(seed=seed, data=data)
    return task
