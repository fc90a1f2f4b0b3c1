"""Studies whose trainings run in this process: options, the model of simulated ranks, rows that a later run keeps."""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mpicomp.bench.tasks import Task, list_tasks
from numpy.typing import NDArray

from mpicomp.cli.options import check_writable, read_list
from mpicomp.errors import MpicompError
from mpicomp.setting_checks import check_least


def add_arguments(parser: argparse.ArgumentParser, task: str) -> None:
    """Declare tasks, seeds, steps and the file of rows; ``task`` is the default."""
    parser.add_argument("--task", default=task, metavar="T[,..]", help=f"{', '.join(list_tasks())} (%(default)s)")
    parser.add_argument("--seeds", default="0", metavar="K[,..]", help="(%(default)s)")
    parser.add_argument("--steps", type=int, metavar="S", help="of a training (those of the task)")
    parser.add_argument(
        "--rows", metavar="F.jsonl", help="append each training's row to F; what is there is not run again"
    )
    parser.set_defaults(alone=True)


class SharedModel:
    """The model that all ranks compute their gradients with, and an optimizer: ``"task"``, ``"sgd"`` or ``"muon"``."""

    def __init__(self, task: Task, steps: int, optimizer: str = "task") -> None:
        from mpicomp.bench.tasks.updating import Updater, inner_optimizer, momentum_sgd  # loads torch

        self.task = task
        self.model = task.model()
        self.parameters = dict(self.model.named_parameters())
        is_sgd = optimizer == "sgd"
        self.optimizer = momentum_sgd(self.model) if is_sgd else inner_optimizer(task, self.model, optimizer)
        self.updater = Updater(task, self.optimizer, steps)

    def backward(self, step: int, rank: int, ranks: int) -> float:
        self.model.zero_grad()
        loss = self.task.loss(self.model, self.task.batch(step, rank, ranks))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {name: grad.numpy().copy() for name, grad in grads.items() if grad is not None}

    def set_gradients(self, means: Mapping[str, NDArray[np.float32]]) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad.numpy()[...] = means[name]

    def quality(self) -> float:
        return self.task.evaluate(self.model)


@dataclass
class Rows:
    """Rows in the order in which they were made, in a file of JSON lines if there is one.

    ``key`` are the fields that tell one row from another. From ``end`` on, a time on the monotonic clock, no more are
    measured: ``late`` names those, and those that failed.
    """

    key: Sequence[str]
    path: Path | None = None
    made: list[dict[str, Any]] = field(default_factory=list)
    end: float = math.inf
    late: list[str] = field(default_factory=list)

    def find(self, *key: Any) -> dict[str, Any] | None:
        return next((row for row in self.made if tuple(row[name] for name in self.key) == key), None)

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        self.made.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row

    def train(self, train: Callable[..., dict[str, Any]], *key: Any) -> dict[str, Any] | None:
        """Train with these values of the key and keep the row; None where there is one already."""
        return None if self.find(*key) is not None else self.keep(train(*key))

    def measure(self, key: Sequence[Any], make: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Make the row of this key, unless it is there; one that fails is printed and left out."""
        name = ", ".join(map(str, key))
        if self.find(*key) is not None:
            return
        if time.monotonic() > self.end:
            self.late.append(name)
            return
        begin = time.monotonic()
        try:
            row = make(*arguments)
        except MpicompError as error:
            print(f"{name}: failed: {error}", flush=True)
            self.late.append(name)
            return
        self.keep(dict(zip(self.key, key, strict=True)) | row)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


def read(
    study: str, arguments: argparse.Namespace, key: Sequence[str], least: int
) -> tuple[list[str], list[int], Rows]:
    """Return the tasks, the seeds and the rows that are there; a training has at least ``least`` steps."""
    if arguments.steps is not None:
        check_least(study, "--steps", arguments.steps, least)
    rows = open_rows(study, arguments.rows, key)
    return read_list(arguments.task), [int(word) for word in read_list(arguments.seeds)], rows


def open_rows(study: str, name: str | None, key: Sequence[str], end: float = math.inf) -> Rows:
    """Return the rows in a file, which new ones are appended to; those of no file are kept nowhere."""
    path = None if name is None else Path(name)
    if path is not None:
        check_writable(study, str(path))
    there = path.read_text().splitlines() if path is not None and path.exists() else []
    return Rows(key, path, [json.loads(line) for line in there], end)
