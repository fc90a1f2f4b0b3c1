"""The base of studies that train: their options, their jobs one after the other, and their tables."""

import argparse
import contextlib
import importlib.util
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicomp.bench.measure import jobs, results, seed_means
from mpicomp.bench.measure.jobs import CUT, DONE, FAILED, Finished
from mpicomp.bench.measure.networks import Network

from mpicomp.cli.options import check_least, check_writable, read_list
from mpicomp.errors import ConfigurationError, UnknownNameError

DENSE = "dense"
"""The arm that all others are compared with."""


@dataclass(frozen=True)
class Goal:
    """The target quality of a task, derived from the quality of dense training.

    Attributes
    ----------
    lower : bool
        Whether a lower quality is the better one.
    factor, offset : float
        The target is ``factor * last quality of dense + offset``.
    seeds : tuple of int
        Default seeds.
    words : str
        The target, for people.
    """

    lower: bool
    factor: float
    offset: float
    seeds: tuple[int, ...]
    words: str

    def target(self, dense: float) -> float:
        """Return the quality that is to be reached, from that of dense in the end with the same seed."""
        return self.factor * dense + self.offset

    def reaches(self, quality: float, target: float) -> bool:
        """Return whether a quality is at least as good as the target."""
        return quality <= target if self.lower else quality >= target

    @property
    def better(self) -> str:
        """Which quality is the better one, for people."""
        return f"quality: {'lower' if self.lower else 'higher'} is better"


@dataclass(frozen=True)
class Training:
    """A call of `mpicomp train`.

    Attributes
    ----------
    arm : str
        The name of the policy or exchange that is compared.
    network : Network or None
        Of the lab; None is one host.
    """

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
        """Kind of the run, for people: its seed."""
        return f"seed {self.seed}"

    def __str__(self) -> str:
        """Describe the run for people."""
        return f"{self.task}, {self.network or 'one host'}, {self.arm}, {self.kind}"


def place_of(network: Network | None) -> str:
    """Return the part of file names that stands for a network."""
    return "host" if network is None else f"{network.bandwidth}-{network.latency}"


class Runner(ABC):
    """Runs the jobs of a study one after the other.

    Parameters
    ----------
    folder : Path
        Of their files; see `mpicomp.bench.measure.jobs.Folder`.
    ranks : int
        Of each.

    Attributes
    ----------
    finished : dict
        Results of the runs so far.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.finished: dict[Any, Any] = {}
        self.ranks = ranks
        self.folder = jobs.Folder(folder)

    @abstractmethod
    def run(self, run: Any, left_s: float) -> Finished:
        """Run one, unless its files are complete, in at most ``left_s`` seconds, and return its result."""

    @abstractmethod
    def fill(self, finished: Any) -> bool:
        """Read the files of a run, and return whether they are complete."""

    @abstractmethod
    def summary(self, finished: Any) -> str:
        """Return the result of a finished run in a few words."""

    def command(self, run: Any, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command of a run with words after ``mpicomp``, and what the environment has besides."""
        return jobs.on_one_host(self.ranks, words)

    def run_job(
        self, finished: Any, words: Sequence[str], files: Mapping[str, str], mark: Mapping[str, Any], left_s: float
    ) -> None:
        """Run one with words after ``mpicomp`` and options for the files that it writes; see `jobs.Job`."""
        run = finished.run
        job = jobs.Job(run.name, lambda: self.command(run, words), files, {"words": finished.words, **mark})
        self.folder.run(job, finished, lambda: self.fill(finished), left_s, self.expected_s(run))

    def expected_s(self, run: Any) -> float:
        """Return the mean seconds of other seeds of a run, or else of its network, or else of its task; 0 at first."""
        done = [own for own in self.finished.values() if own.status == DONE]
        done = [own for own in done if type(own.run) is type(run) and own.run.task == run.task]
        there = [own for own in done if own.run.network == run.network]
        same = [own for own in there if isinstance(run, Training) and own.run.arm == run.arm]
        found = [own.seconds for own in same or there or done]
        return sum(found) / len(found) if found else 0.0


class Table(ABC):
    """Table of the results of a study."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return a row for everything that was compared so far; docs/studies.md describes its columns."""

    @abstractmethod
    def told(self, finished: Any) -> dict[str, Any]:
        """Return a run's description and results; docs/studies.md describes the fields."""

    @abstractmethod
    def title(self, row: Mapping[str, Any]) -> str:
        """Return the heading that a row stands below."""

    @abstractmethod
    def cells(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return a row's cells for people, by column."""

    @abstractmethod
    def explained(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return lines that explain the table."""


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


def run_all(
    study: str, where: str, runs: Sequence[Any], runner: Runner, table: Table, minutes: float, path: str | None
) -> int:
    """Run everything, with a line for each run, and print the tables; return 1 where a run failed, else 0.

    Parameters
    ----------
    study, where : str
        For the first line.
    runs : sequence
        In their order.
    runner : Runner
        Of them.
    table : Table
        Of the runner's runs.
    minutes : float
        For all of them.
    path : str or None
        Of the file that is written after every run.
    """
    print(f"{study}: {len(runs)} runs, {where}, at most {minutes:.0f} minutes", flush=True)
    with terminated():
        run_each(runs, runner, table, time.monotonic() + 60 * minutes, path)
    show(table, runner)
    return int(any(own.status == FAILED for own in runner.finished.values()))


def run_each(runs: Sequence[Any], runner: Runner, table: Table, end: float, path: str | None) -> None:
    """Run everything, with a line for each run; what has no time left before ``end`` on the clock is cut."""
    begin = time.monotonic()
    for place, own in enumerate(runs, 1):
        finished = runner.run(own, end - time.monotonic())
        left = sum(runner.expected_s(other) for other in runs[place:])
        rest = f"{len(runs) - place} left, about {min(left, max(0.0, end - time.monotonic())) / 60:.0f} minutes"
        passed = time.monotonic() - begin
        print(f"{passed:6.0f} s  {place}/{len(runs)}  {own}: {_outcome(finished, runner)}; {rest}", flush=True)
        if path is not None:
            told = [table.told(each) for each in runner.finished.values()]
            results.write(path, table.rows(), 1, runs=told)


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """Have SIGTERM, which batch systems send, end this process as an error does: what it has started ends with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _outcome(finished: Finished, runner: Runner) -> str:
    """Return the result of a run in a few words."""
    if finished.error is not None:
        return f"{finished.status}: {finished.error}"
    how = "there already" if finished.kept else f"{finished.seconds:.0f} s"
    return f"{how}{runner.summary(finished)}"


def show(table: Table, runner: Runner) -> None:
    """Print the rows below their headings, and their explanation."""
    rows = table.rows()
    for title in dict.fromkeys(map(table.title, rows)):
        cells = [table.cells(row) for row in rows if table.title(row) == title]
        first, *numbers, last = cells[0]
        print(f"\n{title}")
        results.show(cells, {first: "", **dict.fromkeys(numbers, ">"), last: ""})
    print("\n" + "\n".join([*table.explained(rows), *unfinished(runner.finished.values())]))


def unfinished(finished: Collection[Finished]) -> list[str]:
    """Return which runs were cut, and which failed."""
    lines = []
    cut = [str(own.run) for own in finished if own.status == CUT]
    if cut:
        lines.append(f"cut, since the time was over: {'; '.join(cut)}")
    failed = [f"{own.run} ({own.error})" for own in finished if own.status == FAILED]
    if failed:
        lines.append(f"failed: {'; '.join(failed)}")
    return lines


def problem(finished: Sequence[Finished]) -> str | None:
    """Return the first error among runs; where none failed, how many were cut."""
    failed = [own for own in finished if own.status == FAILED]
    if failed:
        return f"{failed[0].run.kind}: {failed[0].error}"
    cut = sum(own.status == CUT for own in finished)
    return f"{cut} of {len(finished)} runs were cut: the time was over" if cut else None


def ending(finished: Finished) -> dict[str, Any]:
    """Return the results of `Table.told` for every run."""
    return {name: getattr(finished, name) for name in ("words", "status", "error", "kept", "seconds")}


def over_seeds(names: Sequence[str], seeds: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return mean and deviation of values that every seed has."""
    row: dict[str, float | None] = {}
    for name in names:
        row |= seed_means.mean_and_deviation(name, [own[name] for own in seeds])
    return row
