"""The frame of studies that start trainings: runs as jobs one after the other, rows over seeds, and tables of these."""

import argparse
import contextlib
import importlib.util
import math
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab_jobs
import numpy as np
from lab_jobs import CUT, DONE, FAILED, Finished, Network
from mpicomp.bench.measure import results

from mpicomp.cli.options import check_writable, read_list
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.setting_checks import check_least

DENSE = "dense"
"""The arm that all others are compared with."""

Fields = dict[str, tuple[str, str]]
"""Type in JSON and meaning of each field of a row, as the documentation shows them."""
Row = Mapping[str, Any]
Column = tuple[str, str] | tuple[str, str, float] | Callable[[Row], str]
"""A column of a table: the row's field, its format, and what it is divided by; or what makes the cell of a row."""


@dataclass(frozen=True)
class Goal:
    """The target quality of a task: ``factor * last quality of dense + offset``, in ``words`` for people."""

    lower: bool  # a lower quality is the better one
    factor: float
    offset: float
    seeds: tuple[int, ...]  # unless others are named
    words: str

    def target(self, dense: float) -> float:
        return self.factor * dense + self.offset

    def reaches(self, quality: float, target: float) -> bool:
        return quality <= target if self.lower else quality >= target

    @property
    def better(self) -> str:
        return f"quality: {'lower' if self.lower else 'higher'} is better"


@dataclass(frozen=True)
class Training:
    """A call of `mpicomp train` with an arm of the comparison, in a lab or, without a network, on one host."""

    task: str
    arm: str
    seed: int
    network: Network | None = None

    @property
    def name(self) -> str:
        """Start of the names of its files."""
        return f"{self.task}-{place_of(self.network)}-{self.arm}-{self.seed}"

    @property
    def kind(self) -> str:
        return f"seed {self.seed}"

    def __str__(self) -> str:
        return f"{self.task}, {self.network or 'one host'}, {self.arm}, {self.kind}"


def place_of(network: Network | None) -> str:
    """Return the part of file names that stands for a network."""
    return "host" if network is None else f"{network.bandwidth}-{network.latency}"


class Comparison(ABC):
    """The runs of a study, their results in ``finished``, and the table of these."""

    columns: Mapping[str, Column]

    def __init__(self, folder: Path, ranks: int) -> None:
        self.finished: dict[Any, Finished] = {}
        self.ranks = ranks
        self.folder = lab_jobs.Folder(folder)

    @abstractmethod
    def run(self, run: Any, left_s: float) -> Finished:
        """Run one, unless its files are complete, in at most ``left_s`` seconds, and keep its result."""

    @abstractmethod
    def read(self, run: Any) -> dict[str, Any] | None:
        """Return the outcome of a run from its files, None where they are not complete."""

    @abstractmethod
    def summary(self, finished: Finished) -> str:
        """Return the result of a finished run in a few words."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return a row for everything that was compared so far; docs/studies.md describes its fields."""

    @abstractmethod
    def describe(self, finished: Finished) -> dict[str, Any]:
        """Return a run and its results for the file; docs/studies.md describes the fields."""

    @abstractmethod
    def title(self, row: Row) -> str:
        """Return the heading that a row stands below."""

    @abstractmethod
    def notes(self, rows: Sequence[Row]) -> list[str]:
        """Return lines that explain the table."""

    def command(self, run: Any, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command of a run with words after ``mpicomp``, and what is added to the environment."""
        return lab_jobs.on_one_host(self.ranks, words)

    def run_job(
        self, run: Any, words: Sequence[str], files: Mapping[str, str], mark: Row, left_s: float,
        kept_words: Sequence[str] | None = None,
    ) -> Finished:  # fmt: skip
        """Run words after ``mpicomp`` and options for files, and keep the result; see `lab_jobs.Job`.

        Files count as complete while ``mark`` and ``kept_words``, which are ``words`` if not given, are the same.
        """
        finished = Finished(run, FAILED, words=list(words if kept_words is None else kept_words))

        def is_complete() -> bool:
            finished.outcome = self.read(run) or {}
            return bool(finished.outcome)

        job = lab_jobs.Job(run.name, lambda: self.command(run, words), files, {"words": finished.words, **mark})
        self.folder.run(job, finished, is_complete, left_s, self.expected_s(run))
        self.finished[run] = finished
        return finished

    def expected_s(self, run: Any) -> float:
        """Return the mean seconds of other seeds of a run, or else of its network, or else of its task; 0 at first."""
        done = [other for other in self.finished.values() if other.status == DONE]
        done = [other for other in done if type(other.run) is type(run) and other.run.task == run.task]
        there = [other for other in done if other.run.network == run.network]
        same = [other for other in there if isinstance(run, Training) and other.run.arm == run.arm]
        found = [other.seconds for other in same or there or done]
        return sum(found) / len(found) if found else 0.0

    def cells(self, row: Row) -> dict[str, str]:
        """Return a row's cells for people, by column."""
        return {
            title: column(row) if callable(column) else cell(row, *column) for title, column in self.columns.items()
        }


# Rows over seeds


def means(meanings: Mapping[str, str], deviations: Mapping[str, str] | None = None) -> Fields:
    """Return the fields of values that a row has mean and deviation of."""
    return {
        field: what
        for name, meaning in meanings.items()
        for field, what in {
            name: ("number or null", meaning),
            f"{name}_deviation": ("number or null", (deviations or {}).get(name, "")),
        }.items()
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, and None where a seed has no value: a mean of the others would flatter."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def over_seeds(names: Collection[str], seeds: Sequence[Row]) -> dict[str, float | None]:
    """Return mean and deviation, which takes two seeds, of values that every seed has."""
    row: dict[str, float | None] = {}
    for name in names:
        values = [seed[name] for seed in seeds]
        row[name] = mean(values)
        several = row[name] is not None and len(values) > 1
        row[f"{name}_deviation"] = float(np.std(values, ddof=1)) if several else None
    return row


def finite(value: float) -> float | None:
    """Return a number that JSON has, None where it is none."""
    return float(value) if math.isfinite(value) else None


def cell(row: Row, name: str, form: str, scale: float = 1.0) -> str:
    """Return a value of a row, in brackets its deviation or its interval where the row has one.

    Examples
    --------
    >>> cell({"wire": 2e6, "wire_deviation": 1e5}, "wire", ".1f", 1e6)
    '2.0 (0.1)'
    >>> cell({"ratio": 2.0, "ratio_low": 1.0, "ratio_high": 4.0}, "ratio", ".1f")
    '2.0 (1.0 to 4.0)'
    """
    value, deviation, low = (row.get(field) for field in (name, f"{name}_deviation", f"{name}_low"))
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    spread = "" if deviation is None else f" ({deviation / scale:{form}})"
    spread += "" if low is None else f" ({low / scale:{form}} to {row[f'{name}_high'] / scale:{form}})"
    return format(value / scale, form) + spread


def problem(finished: Sequence[Finished]) -> str | None:
    """Return the first error among runs; where none failed, how many were cut."""
    failed = [one for one in finished if one.status == FAILED]
    if failed:
        return f"{failed[0].run.kind}: {failed[0].error}"
    cut = sum(one.status == CUT for one in finished)
    return f"{cut} of {len(finished)} runs were cut: the time was over" if cut else None


RUN_FIELDS: Fields = {
    "words": ("list of strings", "after `mpicomp`, without files"),
    "status": ("string", "`done`, `failed` or `cut`"),
    "error": ("string or null", "last line of the error"),
    "kept": ("boolean", "whether its files were there before"),
    "seconds": ("number", "that the run took, when it was run"),
}
"""Fields of every run of `Comparison.describe`, from `ending`."""


def ending(finished: Finished) -> dict[str, Any]:
    return {name: getattr(finished, name) for name in RUN_FIELDS}


# Options


def add_arguments(parser: argparse.ArgumentParser, minutes: float, steps: str = "what the task is tuned for") -> None:
    """Declare the options that all of them have, with these defaults."""
    parser.add_argument("--tasks", default="digits,text-lstm", metavar="T[,..]", help="what is trained (%(default)s)")
    parser.add_argument("--seeds", metavar="K[,..]", help="of models and batches (0,1,2; digits: 0,1,2,3,4)")
    parser.add_argument("--steps", type=int, metavar="S", help=f"of each training ({steps})")
    limit = f"minutes; what has no time left is cut ({minutes:.0f})"
    parser.add_argument("--limit", type=float, metavar="M", help=limit)
    parser.add_argument(
        "--keep",
        metavar="FOLDER",
        help="keep the files of all runs; with the same folder and options again it goes on where it stopped",
    )
    parser.add_argument("--json", metavar="F", help="write rows and runs to F as one JSON object, after every run")
    parser.set_defaults(alone=True)


def read_arms(study: str, option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Read what is compared, all that is known where nothing is named; dense comes first in any case."""
    names = _read_names(study, option, ",".join(known) if text is None else text, known)
    return [DENSE, *(name for name in names if name != DENSE)]


def read_seeds(
    study: str, tasks: str, text: str | None, goals: Mapping[str, Goal], option: str = "--seeds"
) -> dict[str, list[int]]:
    """Read tasks and seeds with commas between them; return the seeds of each task."""
    names = _read_names(study, "--tasks", tasks, list(goals))
    if text is None:
        return {name: list(goals[name].seeds) for name in names}
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{study}: {option} must be whole numbers such as 0,1,2, got {text!r}") from None
    return dict.fromkeys(names, sorted({check_least(study, option, seed, 0) for seed in seeds}))


def _read_names(study: str, option: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(read_list(text)))
    for name in names:
        if name not in known:
            raise UnknownNameError(f"{study}: {option}", name, known)
    if not names:
        raise ConfigurationError(f"{study}: {option} names nothing; write for example {known[0]}")
    return names


def check(study: str, arguments: argparse.Namespace) -> None:
    """Refuse impossible options before anything runs: numbers out of range, files that cannot be written."""
    if arguments.steps is not None:
        check_least(study, "--steps", arguments.steps)
    if arguments.limit is not None and not 0 < arguments.limit < float("inf"):
        raise ConfigurationError(f"{study}: --limit must be minutes above 0, got {arguments.limit}")
    if arguments.json is not None:
        check_writable(study, arguments.json)
    if arguments.keep is not None:
        with contextlib.suppress(OSError):
            Path(arguments.keep).mkdir(parents=True, exist_ok=True)
        check_writable(study, str(Path(arguments.keep) / "files"))


def check_tasks(study: str) -> None:
    """Refuse to begin where tasks cannot be trained."""
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{study}: trains tasks, and there is no {' and no '.join(missing)}; "
            "install what it needs with pip install 'mpicomp[torch,bench]'"
        )


@contextlib.contextmanager
def folder_of(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of the runs' files, which is gone in the end if it is not to be kept."""
    if arguments.keep is not None:
        yield Path(arguments.keep)
        return
    with tempfile.TemporaryDirectory(prefix="mpicomp-study-") as folder:
        yield Path(folder)


# Running


def run_all(
    comparison: Comparison, first_line: str, stages: Iterator[Sequence[Any]], minutes: float, path: str | None
) -> int:
    """Run everything, stage by stage, with a line for each run, and print the tables; return 1 where a run failed.

    After each run the file at ``path``, if there is one, is written. What has no time left is cut.
    """
    print(f"{first_line}, at most {minutes:.0f} minutes", flush=True)
    end = time.monotonic() + 60 * minutes
    with terminated():
        for runs in stages:
            _run_each(comparison, runs, end, path)
    rows = comparison.rows()
    for title in dict.fromkeys(map(comparison.title, rows)):
        cells = [comparison.cells(row) for row in rows if comparison.title(row) == title]
        first, *numbers, last = cells[0]
        print(f"\n{title}")
        results.show(cells, {first: "", **dict.fromkeys(numbers, ">"), last: ""})
    print("\n" + "\n".join([*comparison.notes(rows), *unfinished(comparison.finished.values())]))
    return int(any(one.status == FAILED for one in comparison.finished.values()))


def _run_each(comparison: Comparison, runs: Sequence[Any], end: float, path: str | None) -> None:
    begin = time.monotonic()
    for number, run in enumerate(runs, 1):
        finished = comparison.run(run, end - time.monotonic())
        left = sum(comparison.expected_s(other) for other in runs[number:])
        rest = f"{len(runs) - number} left, about {min(left, max(0.0, end - time.monotonic())) / 60:.0f} minutes"
        passed = time.monotonic() - begin
        if finished.error is not None:
            outcome = f"{finished.status}: {finished.error}"
        else:
            how = "there already" if finished.kept else f"{finished.seconds:.0f} s"
            outcome = f"{how}{comparison.summary(finished)}"
        print(f"{passed:6.0f} s  {number}/{len(runs)}  {run}: {outcome}; {rest}", flush=True)
        if path is not None:
            described = [comparison.describe(each) for each in comparison.finished.values()]
            results.write(path, comparison.rows(), 1, runs=described)


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """Turn SIGTERM, which batch systems send, into an error, so that child processes end with this one."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def unfinished(finished: Collection[Finished]) -> list[str]:
    """Return which runs were cut, and which failed."""
    cut = [str(one.run) for one in finished if one.status == CUT]
    failed = [f"{one.run} ({one.error})" for one in finished if one.status == FAILED]
    lines = [f"cut, since the time was over: {'; '.join(cut)}"] if cut else []
    return [*lines, f"failed: {'; '.join(failed)}"] if failed else lines
