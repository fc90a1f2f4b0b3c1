"""Studies whose trainings run in this process: the options that they share, and rows that a later run goes on from."""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpicomp.bench.tasks import list_tasks

from mpicomp.cli.options import check_least, check_writable, read_list
from mpicomp.errors import MpicompError


def add_arguments(parser: argparse.ArgumentParser, task: str) -> None:
    """Declare tasks, seeds, steps and the file of rows; ``task`` is the default."""
    parser.add_argument("--task", default=task, metavar="T[,..]", help=f"{', '.join(list_tasks())} (%(default)s)")
    parser.add_argument("--seeds", default="0", metavar="K[,..]", help="(%(default)s)")
    parser.add_argument("--steps", type=int, metavar="S", help="of a training (those of the task)")
    parser.add_argument(
        "--rows", metavar="F.jsonl", help="append each training's row to F; what is there is not run again"
    )
    parser.set_defaults(alone=True)


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
