"""The frame of studies: options, rows in a file that a later run continues, tables, and simulated ranks' model."""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from mpicomp.bench.measure import results
from mpicomp.bench.tasks import Task
from numpy.typing import NDArray

from mpicomp import __version__
from mpicomp.cli import run_program
from mpicomp.cli.options import check_writable, read_list
from mpicomp.errors import ConfigurationError, MpicompError, UnknownNameError
from mpicomp.setting_checks import check_least

_ROOT = Path(__file__).resolve().parents[1]
_SOURCE = ("mpicomp", "kernels", "bench", "studies", "setup.cfg")
_COPIED = 1 << 24  # float32 elements that are copied to measure the machine's memory


@dataclass
class Rows:
    """Rows in the order in which they were made, in a file of JSON lines if there is one.

    ``key`` are the fields that tell one row from another, ``origin`` those of the source and the machine that each new
    row gets. From ``end`` on, a time on the monotonic clock, no more are measured: ``late`` names those, and those that
    failed.
    """

    key: Sequence[str]
    path: Path | None = None
    made: list[dict[str, Any]] = field(default_factory=list)
    end: float = math.inf
    origin: Mapping[str, Any] = field(default_factory=dict)
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
        self._check_origin()
        begin = time.monotonic()
        try:
            row = make(*arguments)
        except MpicompError as error:
            print(f"{name}: failed: {error}", flush=True)
            self.late.append(name)
            return
        self.keep(dict(zip(self.key, key, strict=True)) | row)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)

    def _check_origin(self) -> None:
        for name in ("commit", "cores"):
            others = {row.get(name) for row in self.made} - {self.origin.get(name)}
            if others:
                raise ConfigurationError(
                    f"{self.path}: its rows are of {name} {', '.join(map(str, others))} and this is "
                    f"{self.origin.get(name)}, so no row is added; name another file"
                )

    def keep(self, row: dict[str, Any]) -> None:
        row |= self.origin
        self.made.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Study:
    """A script that measures rows, one after the other, and prints tables of them."""

    name: str  # its path below this folder, without ending
    description: str
    key: Sequence[str]  # fields that tell one row from another
    # Measures rows that are missing, or yields the key of each, the function that makes it and that one's arguments
    rows: Callable[[Rows, argparse.Namespace], Iterator[tuple[Any, ...]]]
    show: Callable[[Rows, argparse.Namespace], None]  # prints tables
    # By flag: the default, a metavar and the help. A metavar that ends in [,..] or [;..] is of a list, of numbers where
    # it begins with N or K; without a default such a list is all that is known
    options: Mapping[str, tuple[Any, str, str]]
    least: Mapping[str, int] = field(default_factory=dict)  # of options that are numbers
    known: Mapping[str, Callable[[argparse.Namespace], Iterable[str]]] = field(default_factory=dict)  # names of a list

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=f"studies/{self.name}.py", description=self.description)
        for flag, (default, metavar, text) in self.options.items():
            kind = type(default) if default is not None else str if metavar.endswith("]") else int
            help_text = text if default is None else f"{text} (%(default)s)"
            choices = metavar.split("|") if "|" in metavar else None
            parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=help_text, choices=choices)
        parser.add_argument("--rows", metavar="F.jsonl", help="append rows to F; those in it are not measured again")
        parser.add_argument("--limit", type=float, default=90.0, metavar="M", help="minutes, after which no row begins")
        parser.set_defaults(alone=True)
        return parser

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure missing rows, and print the tables; return 1 where a row is missing."""
        name = Path(self.name).name
        for option, least in self.least.items():
            if getattr(arguments, option) is not None:
                check_least(name, f"--{option}", getattr(arguments, option), least)
        for flag, (_, metavar, _) in self.options.items():
            if metavar.endswith("]"):
                option, text = flag[2:], getattr(arguments, flag[2:])
                known = list(self.known[option](arguments)) if option in self.known else []
                words = known if text is None else read_list(text) if ",.." in metavar else text.split(";")
                for word in words if option in self.known else ():
                    if word not in known:
                        raise UnknownNameError(f"{name}: {flag}", word, known)
                setattr(arguments, option, [int(word) for word in words] if metavar[0] in "KN" else words)
        rows = begin(name, arguments, self.key)
        for key, make, *words in self.rows(rows, arguments):
            rows.measure(key, make, *words)
        self.show(rows, arguments)
        if rows.late:
            print(f"\nnot measured, since the time was over or it failed: {'; '.join(rows.late)}")
        return int(bool(rows.late))

    def main(self) -> None:
        sys.exit(run_program(lambda: self.parser().parse_args(), self.run))


def begin(study: str, arguments: argparse.Namespace, key: Sequence[str]) -> Rows:
    """Return the rows that are there, and have no more made when the time is over."""
    if not 0 < arguments.limit < math.inf:
        raise ConfigurationError(f"{study}: --limit must be minutes above 0, got {arguments.limit}")
    path = None if arguments.rows is None else Path(arguments.rows)
    if path is not None:
        check_writable(study, str(path))
    there = path.read_text().splitlines() if path is not None and path.exists() else []
    origin = {"commit": commit(), "cores": len(os.sched_getaffinity(0)), "copy_gb_s": copy_speed()}
    return Rows(key, path, [json.loads(line) for line in there], time.monotonic() + 60 * arguments.limit, origin)


def commit() -> str:
    """Return the last commit that changed the source, and "+" where files differ from it; the version without git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(_ROOT), *words, "--", *_SOURCE]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("log", "-1", "--format=%h", "--abbrev=10") + "+" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return __version__


def copy_speed() -> float:
    """Return the GB/s at which memory is copied, the median of nine copies of 64 MiB."""
    source, target, seconds = np.ones(_COPIED, np.float32), np.zeros(_COPIED, np.float32), []
    for _ in range(9):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return round(1e-9 * source.nbytes / median(seconds), 2)


def show(
    title: str,
    lines: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
) -> None:
    """Print a table below its title, and notes. Without ``columns`` a key is a name, and the format after a bar."""
    print(f"\n{title}")
    if columns is None:
        columns = dict(key.partition("|")[::2] for key in lines[0]) if lines else {}
        lines = [{key.partition("|")[0]: value for key, value in line.items()} for line in lines]
    results.show(lines, columns)
    for note in notes:
        print(f"- {note}")


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
