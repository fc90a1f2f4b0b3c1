"""Commands as processes, each with its files in a folder: jobs whose files are complete are not run again."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpicomp.bench.lab.launch import find_launcher, find_mpi

DONE, FAILED, CUT = "done", "failed", "cut"

MPICOMP = (sys.executable, "-m", "mpicomp")
"""First words of a command of this package."""

_LONGEST_S = 1800.0  # seconds that a job may take before it is ended
_ENDING_S = 30.0  # seconds that a process has to end after it was told to
_OVER = "not run to its end: the time was over"


@dataclass
class Finished:
    """Result of a run: its status, its error, and its outcome.

    Attributes
    ----------
    run : object
        Description of the run.
    status : str
        `DONE`, `FAILED` or `CUT`.
    error : str or None
        The last line of the error, or the reason for which it was cut.
    seconds : float
        Seconds that it took, when it was run.
    kept : bool
        Whether its files existed before, so that it was not run again.
    words : list of str
        Words of its command after ``mpicomp``, without its files.
    outcome : mapping
        Of a training: the object that ``train --json`` wrote.
    quality : float
        Of a training: quality after all steps, on all held-out data.
    """

    run: Any
    status: str
    error: str | None = None
    seconds: float = 0.0
    kept: bool = False
    words: list[str] = field(default_factory=list)
    outcome: dict[str, Any] = field(default_factory=dict)
    quality: float = float("nan")


@dataclass(frozen=True)
class Job:
    """A command and its files.

    Attributes
    ----------
    name : str
        Start of the names of its files.
    command : callable
        Gives the words, without the options for files, and what the environment has besides. Asked only where the job
        is run.
    files : mapping of str to str
        By option, the kind of file that is written: how its name ends.
    mark : mapping
        Its files count as complete as long as this is the same. JSON gives it back as it is.
    """

    name: str
    command: Callable[[], tuple[list[str], dict[str, str]]]
    files: Mapping[str, str]
    mark: Mapping[str, Any]


class Folder:
    """Runs jobs and keeps their files.

    Beside what a job writes there are ``.log`` with what it prints and ``.done``, which is written last.

    Parameters
    ----------
    path : Path
        It exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # jobs may run elsewhere

    def path(self, name: str, kind: str) -> Path:
        """Return the path of a job's file of a kind."""
        return self._path / f"{name}.{kind}"

    def run(
        self, job: Job, finished: Finished, is_complete: Callable[[], bool], left_s: float, expected_s: float
    ) -> None:
        """Run a job, unless its files are complete.

        Parameters
        ----------
        job : Job
            The job to run.
        finished : Finished
            Receives what became of it.
        is_complete : callable
            Reads the files, and tells whether all is there.
        left_s : float
            Seconds that it may take.
        expected_s : float
            That it will take; it is not begun where they are not left.
        """
        done, log = self.path(job.name, "done"), self.path(job.name, "log")
        before = read_json(done)
        if {name: before.get(name) for name in job.mark} == job.mark and is_complete():
            finished.status, finished.seconds, finished.kept = DONE, float(before["seconds"]), True
            return
        if left_s <= max(0.0, expected_s):
            finished.status, finished.error = CUT, "not run: the time was over"
            return
        written = {option: self.path(job.name, kind) for option, kind in job.files.items()}
        for own in (done, log, *written.values()):
            own.unlink(missing_ok=True)
        files = [word for option, path in written.items() for word in (option, str(path))]
        command, variables = job.command()
        begin = time.monotonic()
        status = execute([*command, *files], {**os.environ, **variables}, log, min(left_s, _LONGEST_S))
        finished.seconds = time.monotonic() - begin
        if status is None:
            late = f"no end after {_LONGEST_S:.0f} s"
            finished.status, finished.error = (CUT, _OVER) if left_s < _LONGEST_S else (FAILED, late)
        elif status != 0:
            finished.status, finished.error = FAILED, last_words(log) or f"status {status}, and nothing was said"
        elif not is_complete():
            finished.status, finished.error = FAILED, "its files are not complete, though it ended well"
        else:
            finished.status = DONE
            new = done.with_suffix(".new")
            new.write_text(json.dumps({**job.mark, "seconds": finished.seconds}) + "\n")
            new.replace(done)


def on_one_host(ranks: int, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs ``mpicomp`` with words as so many ranks here, and what its environment has besides.

    Raises
    ------
    LabError
        Where there is no launcher beside this Python.
    """
    launcher = find_launcher()
    start, more = [str(launcher), "-n", str(ranks)], {}
    if find_mpi(launcher) == "openmpi":
        start.append("--oversubscribe")
        more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        more["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:  # as many as in a lab: sums are then the same
        more["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return [*start, *MPICOMP, *words], more


def execute(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Run a command to its end with its output in a file; return its status, None where the time was over."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.terminate()  # where it has not ended, its time is over or whoever waits was interrupted
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def last_words(log: Path) -> str:
    """Return the last line of an error in what a job has printed; launchers add lines of their own behind it."""
    if not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("mpicomp: ", "lab: ")) or _is_error(line)]
    return (errors or lines or [""])[-1]


def _is_error(line: str) -> bool:
    """Return whether it is the last line of a traceback."""
    name = line.partition(":")[0]
    return name.replace(".", "").replace("_", "").isalnum() and name.endswith("Error")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none, or half of one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines that ``train --metrics`` wrote; an empty list where there are others, or half of one."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, RecursionError, ValueError):
        return []
    return lines if all(isinstance(line, dict) for line in lines) else []
