"""The frame of studies: rows in a file that a later run continues, and the model of ranks in this process."""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mpicomp.bench.tasks import Task
from numpy.typing import NDArray

from mpicomp.cli.options import check_writable
from mpicomp.errors import ConfigurationError, MpicompError


class SharedModel:
    """The model that all ranks compute their gradients with, and its task's optimizer."""

    def __init__(self, task: Task, steps: int) -> None:
        self.task = task
        self.model = task.model()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = task.optimizer(self.model)
        self.schedule = task.schedule(self.optimizer, steps)

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

    def update(self) -> None:
        from mpicomp.bench.trainer import update  # loads torch

        update(self.task, self.optimizer, self.schedule)

    def quality(self) -> float:
        return self.task.evaluate(self.model)

    def copy(self, buffers: bool = True) -> Any:
        """Return a copy of parameters, the optimizer's state, and the model's buffers; not of the learning rate."""
        tensors = [*self.parameters.values(), *(self.model.buffers() if buffers else ())]
        states = {parameter: copy.deepcopy(state) for parameter, state in self.optimizer.state.items()}
        return [(tensor, tensor.detach().clone()) for tensor in tensors], states

    def restore(self, copied: Any) -> None:
        """Restore a result of `copy`, once or several times."""
        tensors, states = copied
        for tensor, values in tensors:
            tensor.detach().copy_(values)
        self.optimizer.state.clear()
        for parameter, state in states.items():
            self.optimizer.state[parameter] = copy.deepcopy(state)


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

    def keep(self, row: dict[str, Any]) -> None:
        self.made.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Declare the file of rows, and the time after which no more are measured."""
    parser.add_argument("--rows", metavar="F.jsonl", help="append every row to F; rows in it are not measured again")
    parser.add_argument(
        "--limit", type=float, default=90.0, metavar="M", help="minutes, after which no row begins (90)"
    )
    parser.set_defaults(alone=True)


def begin(study: str, arguments: argparse.Namespace, key: Sequence[str]) -> Rows:
    """Return the rows that are there, and have no more made when the time is over."""
    if not 0 < arguments.limit < math.inf:
        raise ConfigurationError(f"{study}: --limit must be minutes above 0, got {arguments.limit}")
    path = None if arguments.rows is None else Path(arguments.rows)
    if path is not None:
        check_writable(study, str(path))
    there = path.read_text().splitlines() if path is not None and path.exists() else []
    return Rows(key, path, [json.loads(line) for line in there], time.monotonic() + 60 * arguments.limit)


def print_late(rows: Rows) -> int:
    """Print the rows that were not measured; return the status of the study, 1 where there are such."""
    if rows.late:
        print(f"\nnot measured, since the time was over or it failed: {'; '.join(rows.late)}")
    return int(bool(rows.late))
