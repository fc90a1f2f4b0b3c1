"""Trainings and timings of policies as jobs whose files are kept."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpicomp.bench.measure.jobs import (
    CUT,
    DONE,
    FAILED,
    MPICOMP,
    Folder,
    Job,
    Start,
    on_one_host,
    read_json,
    read_lines,
)
from mpicomp.bench.measure.jobs import Finished as Ended
from mpicomp.bench.policies import (
    DENSE,
    Run,
    Timing,
    Training,
    words_of_timing,
    words_of_training,
)


@dataclass
class Finished(Ended[Run]):
    """What became of a run.

    Attributes
    ----------
    quality : float
        Of a training: after all steps, on all held-out data.
    curve : list of tuple
        Of a training: how many steps were done, and the quality after them on the share of the held-out data that the
        task has for looks on the way.
    timed : mapping
        Of a timing: by policy, what ``bench training --json`` wrote.
    """

    quality: float = float("nan")
    curve: list[tuple[int, float]] = field(default_factory=list)
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)


class Runner:
    """Runs trainings and timings one after the other.

    Parameters
    ----------
    folder : Path
        Of their files; see `mpicomp.bench.measure.jobs.Folder`.
    hosts : int
        Of a lab, and ranks on one host.
    steps : int or None
        Of a training; None is what each task is tuned for.
    start : callable, optional
        See `mpicomp.bench.measure.jobs.Start`.
    """

    def __init__(self, folder: Path, hosts: int, steps: int | None, start: Start | None = None) -> None:
        self.finished: dict[Run, Finished] = {}
        self._folder = Folder(folder, start)
        self._hosts = hosts
        self._steps = steps

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
        files = {"--json": "json", "--metrics": "jsonl"}
        return self._run(Finished(run, FAILED, words=words), words, files, {}, left_s)

    def _time(self, run: Timing, left_s: float) -> Finished:
        sources = [self.finished[own] for own in run.sources if own in self.finished]
        done = {own.run.policy: own for own in sources if isinstance(own.run, Training) and own.status == DONE}
        if not done:  # why is said there
            return Finished(run, CUT, "there are no trainings whose plans could be run")
        paths = {name: self._folder.path(own.run.name, "jsonl") for name, own in done.items()}
        step_bytes = {name: own.outcome["wire_bytes"] / own.outcome["steps"] for name, own in done.items()}
        words = words_of_timing(run, {name: str(path) for name, path in paths.items()}, step_bytes)
        told = words_of_timing(run, {name: path.name for name, path in paths.items()}, step_bytes)  # folders are moved
        digest = hashlib.blake2b(digest_size=8)
        for path in paths.values():
            digest.update(path.read_bytes())
        more = {"traces": digest.hexdigest()}
        return self._run(Finished(run, FAILED, words=told), words, {"--json": "json"}, more, left_s)

    def _run(
        self,
        finished: Finished,
        words: Sequence[str],
        files: Mapping[str, str],
        more: Mapping[str, Any],
        left_s: float,
    ) -> Finished:
        """Run one with words after ``mpicomp`` and options for the files that it writes, and say what became of it."""
        run = finished.run
        mark = {"hosts": self._hosts, "words": finished.words, **more}
        job = Job(run.name, lambda: self._command(run, words), files, mark)
        self._folder.run(job, finished, lambda: self._fill(finished), left_s, self.expected_s(run))
        return finished

    def _fill(self, finished: Finished) -> bool:
        """Read the files of a run, and tell whether they are complete."""
        name = finished.run.name
        outcome = read_json(self._folder.path(name, "json"))
        if isinstance(finished.run, Training):
            return _fill_training(finished, outcome, read_lines(self._folder.path(name, "jsonl")))
        return _fill_timing(finished, finished.run, outcome)

    def _command(self, run: Run, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Give the command of a run, and what the environment has besides."""
        if run.network is None:
            return on_one_host(self._hosts, words)
        links = ["--bandwidth", run.network.bandwidth, "--latency", run.network.latency]
        return [*MPICOMP, "lab", "run", "--hosts", str(self._hosts), *links, "--", *MPICOMP, *words], {}


def _fill_training(finished: Finished, outcome: dict[str, Any], lines: Sequence[Mapping[str, Any]]) -> bool:
    try:
        steps, finished.quality = int(outcome["steps"]), float(outcome["quality"]["value"])
        measured = [(int(line["step"]) + 1, line.get("quality")) for line in lines]
    except (ValueError, KeyError, TypeError):
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
