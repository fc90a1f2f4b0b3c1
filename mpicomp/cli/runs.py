"""What benchmarks that start trainings have in common: their options, and a line for each run."""

import argparse
import contextlib
import importlib.util
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

Run = TypeVar("Run")
_Run = TypeVar("_Run", contravariant=True)


class Runner(Protocol[_Run]):
    """Runs one after the other."""

    def run(self, run: _Run, left_s: float) -> Any:
        """Run one in at most so many seconds, and give what became of it."""

    def expected_s(self, run: _Run) -> float:
        """Give the seconds that one will take, as far as those before tell; 0 at first."""
        raise NotImplementedError


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


def read_names(command: str, option: str, text: str, known: Sequence[str]) -> list[str]:
    """Read names with commas between them."""
    from mpicomp.cli.options import read_list
    from mpicomp.errors import ConfigurationError, UnknownNameError

    names = list(dict.fromkeys(read_list(text)))
    for name in names:
        if name not in known:
            raise UnknownNameError(f"{command}: {option}", name, known)
    if not names:
        raise ConfigurationError(f"{command}: {option} names nothing; write for example {known[0]}")
    return names


def read_seeds(command: str, text: str | None) -> list[int]:
    """Read seeds with commas between them; none where none are named."""
    from mpicomp.cli.options import check_least
    from mpicomp.errors import ConfigurationError

    if text is None:
        return []
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{command}: --seeds must be whole numbers such as 0,1,2, got {text!r}") from None
    return sorted({check_least(command, "--seeds", seed, 0) for seed in seeds})


def check(command: str, arguments: argparse.Namespace) -> None:
    """Say in time what cannot be: numbers out of range, files that cannot be written."""
    from mpicomp.cli.options import check_least, check_writable
    from mpicomp.errors import ConfigurationError

    if arguments.steps is not None:
        check_least(command, "--steps", arguments.steps)
    if arguments.limit is not None and not 0 < arguments.limit < float("inf"):
        raise ConfigurationError(f"{command}: --limit must be minutes above 0, got {arguments.limit}")
    if arguments.json is not None:
        check_writable(command, arguments.json)
    if arguments.keep is not None:
        with contextlib.suppress(OSError):
            Path(arguments.keep).mkdir(parents=True, exist_ok=True)
        check_writable(command, str(Path(arguments.keep) / "files"))


def check_tasks(command: str) -> None:
    """Say in time that the tasks cannot be trained here."""
    from mpicomp.errors import ConfigurationError

    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{command}: trains tasks, and there is no {' and no '.join(missing)}; "
            "install what it needs with pip install 'mpicomp[torch,bench]'"
        )


@contextlib.contextmanager
def folder_of(arguments: argparse.Namespace) -> Iterator[Path]:
    """Give the folder of the runs' files, which is gone in the end if it is not to be kept."""
    if arguments.keep is not None:
        yield Path(arguments.keep)
        return
    with tempfile.TemporaryDirectory(prefix="mpicomp-bench-") as folder:
        yield Path(folder)


def write(path: str | None, rows: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    """Write what there is so far, if a file was named: rows of the tables, and what is told of runs."""
    from mpicomp.bench.measure.results import SCHEMA, environment

    if path is None:
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"schema": SCHEMA, "environment": environment(1, "cpu"), "rows": rows, "runs": told}, file, indent=1)
        file.write("\n")


def run_all(
    command: str,
    where: str,
    runs: Sequence[Run],
    runner: Runner[Run],
    limit_s: float,
    results: Callable[[Any], str],
    write: Callable[[], None],
) -> None:
    """Run everything, with a line for each run.

    Parameters
    ----------
    command, where : str
        For the first line.
    runs : sequence
        In their order.
    runner : Runner
        Of them.
    limit_s : float
        Seconds for all of them.
    results : callable
        Says in a few words what a run that is done has found.
    write : callable
        Called after every run.
    """
    begin = time.monotonic()
    print(f"{command}: {len(runs)} runs, {where}, at most {limit_s / 60:.0f} minutes", flush=True)
    with _terminated():
        for place, own in enumerate(runs, 1):
            finished = runner.run(own, limit_s - (time.monotonic() - begin))
            passed = time.monotonic() - begin
            left = sum(runner.expected_s(other) for other in runs[place:])
            rest = f"{len(runs) - place} left, about {min(left, max(0.0, limit_s - passed)) / 60:.0f} minutes"
            print(f"{passed:6.0f} s  {place}/{len(runs)}  {own}: {_came_to(finished, results)}; {rest}", flush=True)
            write()


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Have SIGTERM, which batch systems send, end this process as an error does: what it has started ends with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _came_to(finished: Any, results: Callable[[Any], str]) -> str:
    """Say in a few words what became of a run."""
    if finished.error is not None:
        return f"{finished.status}: {finished.error}"
    how = "there already" if finished.kept else f"{finished.seconds:.0f} s"
    return f"{how}{results(finished)}"
