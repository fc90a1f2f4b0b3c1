"""The frame of studies that start trainings: runs as jobs one after the other, rows over seeds, and tables of these."""

import argparse
import contextlib
import hashlib
import importlib.util
import math
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lab_jobs
import numpy as np
from lab_jobs import CUT, DONE, FAILED, MPICOMP, Finished, Network, lab_words, read_json, read_lines
from mpicomp.bench.measure import results
from policy_runs import (
    AS_NAMED,
    DENSE,
    GOALS,
    Goal,
    Run,
    Timing,
    Training,
    mean_over_steps,
    steps_to,
    words_of_timing,
    words_of_training,
)

from mpicomp.cli.options import check_writable, read_list
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.setting_checks import check_least

Fields = dict[str, tuple[str, str]]  # type in JSON and meaning of each field of a row, as the documentation shows them
Row = Mapping[str, Any]
Column = tuple[str, str] | tuple[str, str, float] | Callable[[Row], str]
"""A column of a table: the row's field, its format, and what it is divided by; or what makes the cell of a row."""


class Comparison(ABC):
    """The runs of a study, in labs with as many hosts as ranks or on one host; their results, and the table of these.

    The outcome of a training is the object of ``train --json`` with its ``curve``; of a timing it is ``timed``, by
    policy the row of ``bench training --json``.
    """

    columns: Mapping[str, Column]

    def __init__(self, folder: Path, hosts: int, networks: Sequence[Network], steps: int | None) -> None:
        self.finished: dict[Any, Finished] = {}
        self.ranks = hosts
        self.folder = lab_jobs.Folder(folder)
        self.networks = networks
        self._steps = steps  # None: the steps that each task is tuned for

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

    def run_job(
        self, run: Any, words: Sequence[str], files: Mapping[str, str], mark: Row, left_s: float,
        kept_words: Sequence[str] | None = None,
    ) -> Finished:  # fmt: skip
        """Run words with options for files, which stay complete while ``mark`` and ``kept_words`` are the same."""
        finished = Finished(run, FAILED, words=list(words if kept_words is None else kept_words))

        def is_complete() -> bool:
            finished.outcome = self.read(run) or {}
            return bool(finished.outcome)

        job = lab_jobs.Job(run.name, lambda: self.command(run, words), files, {"words": finished.words, **mark})
        self.folder.run(job, finished, is_complete, left_s, self.expected_s(run))
        self.finished[run] = finished
        return finished

    def run(self, run: Run, left_s: float) -> Finished:
        """Run one, unless its files are complete, in at most ``left_s`` seconds, and keep its result."""
        if isinstance(run, Timing):
            return self._time(run, left_s)
        words, files = words_of_training(run, self._steps), {"--json": "json", "--metrics": "jsonl"}
        return self.run_job(run, words, files, {"hosts": self.ranks}, left_s)

    def _time(self, run: Timing, left_s: float) -> Finished:
        sources = [self.finished[source] for source in run.sources if source in self.finished]
        done = {source.run.arm: source for source in sources if source.status == DONE}
        if not done:  # their errors say why
            self.finished[run] = Finished(run, CUT, "there are no trainings whose plans could be run")
            return self.finished[run]
        paths = {name: self.folder.path(source.run.name, "jsonl") for name, source in done.items()}
        step_bytes = {name: source.outcome["wire_bytes"] / source.outcome["steps"] for name, source in done.items()}
        words = words_of_timing(run, {name: str(path) for name, path in paths.items()}, step_bytes)
        digest = hashlib.blake2b(digest_size=8)
        for path in paths.values():
            digest.update(path.read_bytes())
        mark = {"hosts": self.ranks, "traces": digest.hexdigest()}
        kept = words_of_timing(run, {name: path.name for name, path in paths.items()}, step_bytes)  # folders are moved
        return self.run_job(run, words, {"--json": "json"}, mark, left_s, kept)

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the outcome of a run from its files, None where they are not complete."""
        outcome = read_json(self.folder.path(run.name, "json"))
        try:
            if isinstance(run, Timing):
                rows = {Path(row["exchange"]).name: row for row in outcome["rows"]}  # of a path the file
                names = {
                    source.arm: source.arm if source.arm in AS_NAMED else f"{source.name}.jsonl"
                    for source in run.sources
                }
                timed = {policy: rows[name] for policy, name in names.items() if name in rows}
                return {"timed": timed} if timed else None
            lines = read_lines(self.folder.path(run.name, "jsonl"))
            measured = [(int(line["step"]) + 1, line.get("quality")) for line in lines]
            curve = [(step, float(quality)) for step, quality in measured if quality is not None]
            outcome |= {"curve": curve, "quality": float(outcome["quality"]["value"])}
            return outcome if len(lines) == int(outcome["steps"]) and curve else None
        except (ValueError, KeyError, TypeError):
            return None

    def command(self, run: Run, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command of a run with words after ``mpicomp``, and what is added to the environment."""
        if run.network is None:
            return lab_jobs.on_one_host(self.ranks, words)
        return [*lab_words(self.ranks, run.network), *MPICOMP, *words], {}

    def summary(self, finished: Finished) -> str:
        outcome = finished.outcome
        if "timed" in outcome:
            return "; s a step: " + ", ".join(f"{name} {row['median_s']:.4g}" for name, row in outcome["timed"].items())
        return f", {float(outcome['median_step_s']):.4g} s a step, quality {outcome['quality']:.4f}"

    def of(self, task: str, network: Network) -> list[Finished]:
        return [one for run, one in self.finished.items() if run.task == task and run.network in (None, network)]

    def timed_on(self, task: str, network: Network, seed: int | None = None) -> dict[str, dict[str, Any]]:
        """Return, by policy, the rows of steps that were timed on a network, with the plans of a seed or of any."""
        for run, one in self.finished.items():
            asked = isinstance(run, Timing) and seed in (None, run.seed)
            if asked and (run.task, run.network, one.status) == (task, network, DONE):
                return one.outcome["timed"]  # type: ignore[no-any-return]
        return {}

    def learned(self, one: Finished) -> dict[str, Any]:
        """Return the quality of a finished training, and its targets where dense ended with the same seed."""
        run, curve, goal = one.run, one.outcome["curve"], GOALS[one.run.task]
        found: dict[str, Any] = {"quality": finite(one.outcome["quality"])}
        found |= dict.fromkeys(("quality_limit", "target", "steps_to_quality"))
        found["mean_quality"] = mean_over_steps(curve)
        dense = self.finished.get(Training(run.task, DENSE, run.seed, None))
        if dense is not None and dense.status == DONE:
            # On the way fewer held-out data are evaluated than in the end: each is compared with its like.
            found["quality_limit"] = finite(goal.target(dense.outcome["quality"]))
            found["target"] = target = finite(goal.target(dense.outcome["curve"][-1][1]))
            if target is not None:
                found["steps_to_quality"] = steps_to(curve, target, goal.lower)
        return found

    def result(self, one: Finished, timed: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the results of a finished training, with the row of its plans where they were timed on the network."""
        choosing_s = float(one.outcome["choosing_s"])
        result: dict[str, Any] = {"seed": one.run.seed, "steps": int(one.outcome["steps"])}
        result |= {"wire_bytes": float(one.outcome["wire_bytes"]), **self.learned(one), "choosing_s": choosing_s}
        result |= dict.fromkeys(("median_step_s", "time_to_quality_s", "summed_s"))
        if timed is not None:
            # Plans that are run again are not chosen again.
            result["median_step_s"] = median_s = float(timed["median_s"]) + choosing_s
            steps = result["steps_to_quality"]
            if steps is not None:
                result["time_to_quality_s"] = steps * median_s
                result["summed_s"] = steps * (float(timed["mean_s"]) + choosing_s)
        return result

    def expected_s(self, run: Any) -> float:
        """Return the mean seconds of other seeds of a run, or else of its network, or else of its task; 0 at first."""
        done = [other for other in self.finished.values() if other.status == DONE]
        done = [other for other in done if type(other.run) is type(run) and other.run.task == run.task]
        there = [other for other in done if other.run.network == run.network]
        same = [other for other in there if isinstance(run, Training) and other.run.arm == run.arm]
        found = [other.seconds for other in same or there or done]
        return sum(found) / len(found) if found else 0.0

    def cells(self, row: Row) -> dict[str, str]:
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
    """Run everything, stage by stage, write ``path`` after each run, print tables; return 1 where a run failed."""
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
