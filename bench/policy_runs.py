"""Trainings as processes of their own, each with its files in a folder: what is complete there is not run again."""

import hashlib
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
from mpicomp.bench.policies import Run, words_of

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
        What ``train --json`` wrote.
    step_s : list of float
        Seconds of each step on rank 0.
    quality : float
        After all steps, on all held-out data.
    curve : list of tuple
        How many steps were done, and the quality after them on the share of the held-out data that the task has for
        looks on the way.
    """

    run: Run
    status: str
    error: str | None = None
    seconds: float = 0.0
    kept: bool = False
    words: list[str] = field(default_factory=list)
    outcome: dict[str, Any] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    quality: float = float("nan")
    curve: list[tuple[int, float]] = field(default_factory=list)


class Trainings:
    """Runs trainings one after the other.

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
        source = self.finished.get(run.source) if run.replay else None
        if run.replay and (source is None or source.status != DONE):
            # What its source lacks is said there.
            status = CUT if source is None or source.status == CUT else FAILED
            finished = Finished(run, status, f"there is no trace of plans: {run.source.name} {status}")
        else:
            finished = self._run(run, source, left_s)
        self.finished[run] = finished
        return finished

    def expected_s(self, run: Run) -> float:
        """Give the mean seconds of other seeds of a run, or else of its network, or else of its task; 0 at first."""
        done = [own for own in self.finished.values() if own.status == DONE]
        done = [own for own in done if (own.run.task, own.run.replay) == (run.task, run.replay)]
        there = [own for own in done if own.run.network == run.network]
        same = [own for own in there if own.run.policy == run.policy]
        found = [own.seconds for own in same or there or done]
        return sum(found) / len(found) if found else 0.0

    def _run(self, run: Run, source: Finished | None, left_s: float) -> Finished:
        path = {kind: self._folder / f"{run.name}.{kind}" for kind in ("json", "jsonl", "log", "done")}
        trace = self._folder / f"{run.source.name}.jsonl"
        words = words_of(run, self._steps, source.outcome if source else None, str(trace))
        told = ["TRACE" if word == str(trace) else word for word in words]  # folders may be moved
        mark: dict[str, Any] = {"hosts": self._hosts, "words": told}
        if source is not None:
            mark["trace"] = hashlib.blake2b(trace.read_bytes(), digest_size=8).hexdigest()
        before = _read(path["done"])
        if {name: before.get(name) for name in mark} == mark:
            finished = Finished(run, DONE, None, float(before["seconds"]), True, told)
            if _fill(finished, path["json"], path["jsonl"]):
                return finished
        if left_s <= max(0.0, self.expected_s(run)):
            return Finished(run, CUT, "not run: the time was over", words=told)
        for own in path.values():
            own.unlink(missing_ok=True)
        files = ["--json", str(path["json"]), "--metrics", str(path["jsonl"])]
        command, more = self._command(run, [*words, *files])
        begin = time.monotonic()
        status = self._start(command, {**os.environ, **more}, path["log"], min(left_s, _LONGEST_S))
        finished = Finished(run, FAILED, None, time.monotonic() - begin, False, told)
        if status is None:
            late = f"no end after {_LONGEST_S:.0f} s"
            finished.status, finished.error = (CUT, _OVER) if left_s < _LONGEST_S else (FAILED, late)
        elif status != 0:
            finished.error = last_words(path["log"]) or f"status {status}, and nothing was said"
        elif not _fill(finished, path["json"], path["jsonl"]):
            finished.error = "its files are not complete, though it ended well"
        else:
            finished.status = DONE
            written = path["done"].with_suffix(".new")
            written.write_text(json.dumps(mark | {"seconds": finished.seconds}) + "\n")
            written.replace(path["done"])
        return finished

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


def _fill(finished: Finished, outcome: Path, metrics: Path) -> bool:
    """Read the files of a run, and tell whether they are complete."""
    finished.outcome = _read(outcome)
    try:
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        steps, finished.quality = int(finished.outcome["steps"]), float(finished.outcome["quality"]["value"])
        finished.step_s = [float(line["seconds"]) for line in lines]
        measured = [(int(line["step"]) + 1, line.get("quality")) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    finished.curve = [(step, float(quality)) for step, quality in measured if quality is not None]
    return len(lines) == steps and (finished.run.replay or len(finished.curve) > 0)
