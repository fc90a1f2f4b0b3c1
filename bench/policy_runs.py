"""Trainings and timings as processes, each with its files in a folder: what is complete there is not run again."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpicomp.bench.lab.launch import find_launcher, find_mpi
from mpicomp.bench.policies import (
    DENSE,
    Run,
    Timing,
    Training,
    words_of_timing,
    words_of_training,
)

DONE, FAILED, CUT = "done", "failed", "cut"

_LONGEST_S = 1800.0  # of a run, which otherwise does not end
_ENDING_S = 30.0  # that a process has to end when it is told to
_OVER = "not run to its end: the time was over"

Start = Callable[[Sequence[str], Mapping[str, str], Path, float], int | None]
"""Runs a command with an environment and a file for its output; gives its status, None where the time was over."""


@dataclass
class Finished:
    """What became of a run.

    Attributes
    ----------
    status : str
        `DONE`, `FAILED` or `CUT`.
    error : str or None
        The last line of the error, or why it was cut.
    seconds : float
        That it took, when it was run.
    kept : bool
        Whether its files were there before.
    words : list of str
        After ``mpicomp``, without its files.
    outcome : mapping
        Of a training: what ``train --json`` wrote.
    quality : float
        Of a training: after all steps, on all held-out data.
    curve : list of tuple
        Of a training: how many steps were done, and the quality after them on the share of the held-out data that the
        task has for looks on the way.
    timed : mapping
        Of a timing: by policy, what ``bench training --json`` wrote.
    """

    run: Run
    status: str
    error: str | None = None
    seconds: float = 0.0
    kept: bool = False
    words: list[str] = field(default_factory=list)
    outcome: dict[str, Any] = field(default_factory=dict)
    quality: float = float("nan")
    curve: list[tuple[int, float]] = field(default_factory=list)
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)


class Runner:
    """Runs trainings and timings one after the other.

    Parameters
    ----------
    folder : Path
        Of their files: ``.json`` and ``.jsonl`` as `mpicomp train` writes them, ``.log`` with what it prints, and
        ``.done``, which is written last.
    hosts : int
        Of a lab, and ranks on one host.
    steps : int or None
        Of a training; None is what each task is tuned for.
    start : callable
        See `Start`.
    """

    def __init__(self, folder: Path, hosts: int, steps: int | None, start: "Start | None" = None) -> None:
        self.finished: dict[Run, Finished] = {}
        self._folder = folder.resolve()  # in a lab and here the same
        self._hosts = hosts
        self._steps = steps
        self._start = start or execute

    def run(self, run: Run, left_s: float) -> Finished:
        """Run one, unless its files are complete, in at most so many seconds."""
        finished = self._train(run, left_s) if isinstance(run, Training) else self._time(run, left_s)
        self.finished[run] = finished
        return finished

    def expected_s(self, run: Run) -> float:
        """Give the mean seconds of other seeds of a run, or else of its network, or else of its task; 0 at first."""
        done = [own for own in self.finished.values() if own.status == DONE]
        done = [own for own in done if type(own.run) is type(run) and own.run.task == run.task]
        there = [own for own in done if own.run.network == run.network]
        same = [own for own in there if isinstance(run, Training) and replace(own.run, seed=run.seed) == run]
        found = [own.seconds for own in same or there or done]
        return sum(found) / len(found) if found else 0.0

    def _train(self, run: Training, left_s: float) -> Finished:
        words = words_of_training(run, self._steps)
        written = {"--json": self._path(run, "json"), "--metrics": self._path(run, "jsonl")}
        return self._run(Finished(run, FAILED, words=words), words, written, {}, left_s)

    def _time(self, run: Timing, left_s: float) -> Finished:
        sources = [self.finished[own] for own in run.sources if own in self.finished]
        done = {own.run.policy: own for own in sources if isinstance(own.run, Training) and own.status == DONE}
        if not done:  # why is said there
            return Finished(run, CUT, "there are no trainings whose plans could be run")
        paths = {name: self._path(own.run, "jsonl") for name, own in done.items()}
        step_bytes = {name: own.outcome["wire_bytes"] / own.outcome["steps"] for name, own in done.items()}
        words = words_of_timing(run, {name: str(path) for name, path in paths.items()}, step_bytes)
        told = words_of_timing(run, {name: path.name for name, path in paths.items()}, step_bytes)  # folders are moved
        digest = hashlib.blake2b(digest_size=8)
        for path in paths.values():
            digest.update(path.read_bytes())
        written = {"--json": self._path(run, "json")}
        return self._run(Finished(run, FAILED, words=told), words, written, {"traces": digest.hexdigest()}, left_s)

    def _run(
        self,
        finished: Finished,
        words: Sequence[str],
        written: Mapping[str, Path],
        more: Mapping[str, Any],
        left_s: float,
    ) -> Finished:
        """Run one with words after ``mpicomp`` and options for the files that it writes, and say what became of it."""
        run = finished.run
        mark: dict[str, Any] = {"hosts": self._hosts, "words": finished.words, **more}
        done, log = self._path(run, "done"), self._path(run, "log")
        before = _read(done)
        if {name: before.get(name) for name in mark} == mark and self._fill(finished):
            finished.status, finished.seconds, finished.kept = DONE, float(before["seconds"]), True
            return finished
        if left_s <= max(0.0, self.expected_s(run)):
            finished.status, finished.error = CUT, "not run: the time was over"
            return finished
        for own in (done, log, *written.values()):
            own.unlink(missing_ok=True)
        files = [word for option, path in written.items() for word in (option, str(path))]
        command, variables = self._command(run, [*words, *files])
        begin = time.monotonic()
        status = self._start(command, {**os.environ, **variables}, log, min(left_s, _LONGEST_S))
        finished.seconds = time.monotonic() - begin
        if status is None:
            late = f"no end after {_LONGEST_S:.0f} s"
            finished.status, finished.error = (CUT, _OVER) if left_s < _LONGEST_S else (FAILED, late)
        elif status != 0:
            finished.error = last_words(log) or f"status {status}, and nothing was said"
        elif not self._fill(finished):
            finished.error = "its files are not complete, though it ended well"
        else:
            finished.status = DONE
            new = done.with_suffix(".new")
            new.write_text(json.dumps(mark | {"seconds": finished.seconds}) + "\n")
            new.replace(done)
        return finished

    def _path(self, run: Run, kind: str) -> Path:
        return self._folder / f"{run.name}.{kind}"

    def _fill(self, finished: Finished) -> bool:
        """Read the files of a run, and tell whether they are complete."""
        outcome = _read(self._path(finished.run, "json"))
        if isinstance(finished.run, Training):
            return _fill_training(finished, outcome, self._path(finished.run, "jsonl"))
        return _fill_timing(finished, finished.run, outcome)

    def _command(self, run: Run, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Give the command of a run, and what the environment has besides."""
        mpicomp = [sys.executable, "-m", "mpicomp"]
        if run.network is not None:
            links = ["--bandwidth", run.network.bandwidth, "--latency", run.network.latency]
            return [*mpicomp, "lab", "run", "--hosts", str(self._hosts), *links, "--", *mpicomp, *words], {}
        launcher = find_launcher()
        start, more = [str(launcher), "-n", str(self._hosts)], {}
        if find_mpi(launcher) == "openmpi":
            start.append("--oversubscribe")
            more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            more["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if "OMP_NUM_THREADS" not in os.environ:  # as many as in a lab: sums are then the same
            more["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // self._hosts))
        return [*start, *mpicomp, *words], more


def execute(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Run a command to its end, or until the time is over; see `Start`."""
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
    """Give the last line of an error in what a job has printed; launchers add lines of their own behind it."""
    if not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("mpicomp: ", "lab: ")) or _is_error(line)]
    return (errors or lines or [""])[-1]


def _is_error(line: str) -> bool:
    """Tell whether it is the last line of a traceback."""
    name = line.partition(":")[0]
    return name.replace(".", "").replace("_", "").isalnum() and name.endswith("Error")


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none, or half of one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _fill_training(finished: Finished, outcome: dict[str, Any], metrics: Path) -> bool:
    try:
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        steps, finished.quality = int(outcome["steps"]), float(outcome["quality"]["value"])
        measured = [(int(line["step"]) + 1, line.get("quality")) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    finished.outcome = outcome
    finished.curve = [(step, float(quality)) for step, quality in measured if quality is not None]
    return len(lines) == steps and len(finished.curve) > 0


def _fill_timing(finished: Finished, run: Timing, outcome: Mapping[str, Any]) -> bool:
    try:
        rows = {Path(row["exchange"]).name: row for row in outcome["rows"]}  # of a path the file
    except (KeyError, TypeError):
        return False
    names = {own.policy: DENSE if own.policy == DENSE else f"{own.name}.jsonl" for own in run.sources}
    finished.timed = {policy: rows[name] for policy, name in names.items() if name in rows}
    return len(finished.timed) > 0
