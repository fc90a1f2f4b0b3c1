"""Runs: files of --json and --metrics, put together by their names."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from mpicomp.bench.report.lines import PHASES, Array, Lines, plan_in_words, read_lines

from mpicomp.errors import ConfigurationError

MOST = 8  # runs in a report: as many as there are colours that can be told apart


@dataclass
class Run:
    """One training.

    Attributes
    ----------
    name : str
        Short, and unlike those of the others.
    outcome : dict or None
        The object of --json.
    lines : Lines or None
        The lines of --metrics. One of the two is there.
    """

    name: str
    outcome: dict[str, Any] | None
    lines: Lines | None
    alone: bool = True
    """Whether it is the only one of the report, so that nothing need say its name."""

    def titled(self, words: str) -> str:
        """Return a title for what is of this run."""
        return f"{words[0].upper()}{words[1:]}" if self.alone else f"{self.name}: {words}"

    @cached_property
    def start(self) -> int:
        """Number of first steps that no seconds are taken from: they compile, agree and grow buffers."""
        return 0 if self.lines is None else min(5, self.lines.step.size // 4)

    @cached_property
    def elapsed(self) -> Array:
        """Seconds since the beginning at the end of every step; of the first steps, each as long as the median."""
        assert self.lines is not None
        seconds = self.lines.seconds.copy()
        seconds[: self.start] = self.step_s
        return np.cumsum(seconds)

    @cached_property
    def step_s(self) -> float:
        """Median seconds of a step: of the slowest rank where --json is there, else of rank 0."""
        if self.outcome is not None:
            return float(self.outcome["median_step_s"])
        assert self.lines is not None
        return float(np.median(self.lines.seconds[self.start :]))

    @cached_property
    def phases_s(self) -> dict[str, float]:
        """Median seconds of each part of a step."""
        if self.outcome is not None:
            return {name: float(self.outcome["phases_s"][name]) for name in PHASES}
        assert self.lines is not None
        return dict(zip(PHASES, np.median(self.lines.phases[self.start :], axis=0).tolist(), strict=True))

    @cached_property
    def bytes_a_step(self) -> tuple[float, float]:
        """Bytes that left a rank in a step, and those that would have left it in a dense ring."""
        if self.outcome is not None:
            steps = self.outcome["steps"]
            return self.outcome["wire_bytes"] / steps, self.outcome["dense_wire_bytes"] / steps
        assert self.lines is not None
        return float(self.lines.wire_bytes.mean()), float(self.lines.dense_wire_bytes.mean())

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        if self.lines is not None:
            return int(self.lines.step.size)
        assert self.outcome is not None
        return int(self.outcome["steps"])

    @cached_property
    def plans(self) -> list[tuple[str, float]]:
        """What was run, in words, each with its share of the elements exchanged; from the largest."""
        if self.lines is not None:
            exchanged = self.lines.shares.sum(axis=1) > 0
            shares = self.lines.shares[exchanged].mean(axis=0) if exchanged.any() else np.zeros(len(self.lines.plans))
            return sorted(zip(self.lines.plans, shares.tolist(), strict=True), key=lambda plan: -plan[1])
        assert self.outcome is not None
        return [
            (plan_in_words(plan["compressor_config"], plan["collective"]), plan["share"])
            for plan in self.outcome["plans"]
        ]

    @property
    def is_dense(self) -> bool:
        """Whether nothing was compressed because that was asked for."""
        chosen = self.outcome is not None and self.outcome["policy"] != "static"
        return not chosen and all(plan.partition(" ")[0] == "dense" for plan, _ in self.plans)

    def quality(self) -> tuple[str, str]:
        """Return the name of the quality, and whether ``higher`` or ``lower`` is better; of the loss without --json."""
        if self.outcome is None:
            return "training loss", "lower"
        return self.outcome["quality"]["name"], self.outcome["quality"]["better"]


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Read files; those whose names are the same before the ending are one run.

    Raises
    ------
    ConfigurationError
        Where a file cannot be read or is neither of the two, where there are too many runs, and where runs of
        different tasks, or files of different runs, would be put together.
    """
    found: dict[str, Run] = {}
    for path in dict.fromkeys(paths):
        key = str(Path(path).with_suffix(""))
        outcome, lines = _read(path)
        run = found.setdefault(key, Run(Path(path).stem, None, None))
        if (run.outcome and outcome) or (run.lines and lines):
            raise ConfigurationError(
                f"report: two files of the run '{key}' are of the same kind; name one of --json and one of --metrics"
            )
        run.outcome, run.lines = run.outcome or outcome, run.lines or lines
    runs = list(found.values())
    if len(runs) > MOST:
        raise ConfigurationError(f"report: at most {MOST} runs can be told apart in a picture, got {len(runs)}")
    for run in runs:
        if run.outcome and run.lines and run.outcome["steps"] != run.lines.step.size:
            raise ConfigurationError(
                f"report: the files of '{run.name}' are of different runs: --json tells of {run.outcome['steps']} "
                f"steps, --metrics of {run.lines.step.size}; give the files of each run a name of their own"
            )
    tasks = {run.outcome["task"]: run.name for run in runs if run.outcome}
    if len(tasks) > 1:
        got = " and ".join(f"{task} ({name})" for task, name in tasks.items())
        raise ConfigurationError(f"report: runs of one task can be compared, got {got}; make a report of each")
    _shorten(runs)
    return runs


def _read(path: str) -> tuple[dict[str, Any] | None, Lines | None]:
    """Return what a file holds: the object of --json, or the lines of --metrics."""
    try:
        if path.endswith("l"):
            return None, read_lines(path)
        with open(path, encoding="utf-8") as file:
            outcome = json.load(file)
    except OSError as error:
        raise ConfigurationError(f"report: '{path}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        return None, read_lines(path)  # several lines are no JSON
    if not isinstance(outcome, dict):
        raise ConfigurationError(f"report: '{path}' is no file that train has written with --json or --metrics")
    if "buckets" in outcome:  # one step
        return None, read_lines(path)
    missing = sorted(_NEEDED - set(outcome))
    if missing:
        raise ConfigurationError(
            f"report: '{path}' has no field '{missing[0]}', so train has not written it with --json; name a file of "
            "--json or --metrics"
        )
    return outcome, None


_NEEDED = {
    *("task", "policy", "ranks", "hosts", "steps", "seed", "quality", "median_step_s", "phases_s", "wire_bytes"),
    *("dense_wire_bytes", "plans", "layers", "verdict"),
}


def _shorten(runs: Sequence[Run]) -> None:
    """Leave out what all names begin with, and add numbers where names are the same."""
    if len(runs) > 1:
        for run in runs:
            run.alone = False
        first, last = min(run.name for run in runs), max(run.name for run in runs)
        same = [one == other for one, other in zip(first, last, strict=False)]
        common = first[: same.index(False) if False in same else len(same)]
        cut = max(common.rfind(mark) for mark in "-_. ") + 1
        for run in runs:
            run.name = run.name[cut:] or run.name
    names = [run.name for run in runs]
    for place, run in enumerate(runs):
        if names.count(run.name) > 1:
            run.name = f"{run.name} {names[: place + 1].count(names[place])}"
