"""Runs: files of --json and --metrics with the same name before the ending."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from mpicomp.bench.report.section_parts import Array, Bins, capital
from mpicomp.bench.report.step_lines import PHASES, Lines, plan_in_words, read_lines

from mpicomp.errors import ConfigurationError

MAX_RUNS = 8  # in a report: as many as there are colours that can be distinguished
_MAX_START_STEPS = 5


@dataclass
class Run:
    """One training."""

    name: str  # short and unique
    outcome: dict[str, Any] | None  # the object of --json
    recorded: Lines | None  # the lines of --metrics. One of the two is there
    is_single: bool = True  # whether it is the only run of the report, so that titles need no name

    @property
    def lines(self) -> Lines:
        """The lines of --metrics of a run that has them."""
        assert self.recorded is not None
        return self.recorded

    @cached_property
    def bins(self) -> Bins:
        """Steps that become one point of a curve."""
        return Bins.of(self.lines.step.size)

    @property
    def prefix(self) -> str:
        """Start of what a sentence lists for each run."""
        return "" if self.is_single else f"{self.name} "

    def titled(self, words: str) -> str:
        """Return a title of something of this run."""
        return capital(words) if self.is_single else f"{self.name}: {words}"

    @cached_property
    def start(self) -> int:
        """Number of first steps without seconds of their own: they compile, agree and grow buffers."""
        return 0 if self.recorded is None else min(_MAX_START_STEPS, self.recorded.step.size // 4)

    @cached_property
    def elapsed(self) -> Array:
        """Seconds since the beginning at the end of every step; a first step counts as the median step."""
        seconds = self.lines.seconds.copy()
        seconds[: self.start] = self.step_s
        return np.cumsum(seconds)

    @cached_property
    def step_s(self) -> float:
        """Median seconds of a step: of the slowest rank with --json, of rank 0 without."""
        if self.outcome is not None:
            return float(self.outcome["median_step_s"])
        return float(np.median(self.lines.seconds[self.start :]))

    @cached_property
    def phases_s(self) -> dict[str, float]:
        """Median seconds of each part of a step."""
        if self.outcome is not None:
            return {name: float(self.outcome["phases_s"][name]) for name in PHASES}
        return dict(zip(PHASES, np.median(self.lines.phases[self.start :], axis=0).tolist(), strict=True))

    @cached_property
    def bytes_per_step(self) -> tuple[float, float]:
        """Bytes that left a rank in a step, and those of a dense ring."""
        if self.outcome is not None:
            steps = self.outcome["steps"]
            return self.outcome["wire_bytes"] / steps, self.outcome["dense_wire_bytes"] / steps
        return float(self.lines.wire_bytes.mean()), float(self.lines.dense_wire_bytes.mean())

    @cached_property
    def steps(self) -> int:
        return int(self.recorded.step.size if self.recorded is not None else (self.outcome or {})["steps"])

    @cached_property
    def plans(self) -> list[tuple[str, float]]:
        """Plans, each with its share of the elements exchanged; the largest comes first."""
        if self.recorded is not None:
            shares = self.lines.shares[self.lines.shares.sum(axis=1) > 0]
            means = shares.mean(axis=0) if len(shares) else np.zeros(len(self.lines.plans))
            return sorted(zip(self.lines.plans, means.tolist(), strict=True), key=lambda plan: -plan[1])
        plans = (self.outcome or {})["plans"]
        return [(plan_in_words(plan["compressor_config"], plan["collective"]), plan["share"]) for plan in plans]

    @property
    def is_dense(self) -> bool:
        """Whether dense exchange was asked for, not chosen."""
        is_chosen = self.outcome is not None and self.outcome["policy"] != "static"
        return not is_chosen and all(plan.partition(" ")[0] == "dense" for plan, _ in self.plans)

    @property
    def quality(self) -> tuple[str, str]:
        """The name of the quality, and whether ``higher`` or ``lower`` is better; the loss without --json."""
        quality = self.outcome["quality"] if self.outcome else {"name": "training loss", "better": "lower"}
        return quality["name"], quality["better"]


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Read files; those whose names are the same before the ending are one run."""
    found: dict[str, Run] = {}
    for path in dict.fromkeys(paths):
        key = str(Path(path).with_suffix(""))
        outcome, lines = _read(path)
        run = found.setdefault(key, Run(Path(path).stem, None, None))
        if (run.outcome and outcome) or (run.recorded and lines):
            raise ConfigurationError(
                f"report: two files of the run '{key}' are of the same kind; name one of --json and one of --metrics"
            )
        run.outcome, run.recorded = run.outcome or outcome, run.recorded or lines
    runs = list(found.values())
    if len(runs) > MAX_RUNS:
        raise ConfigurationError(f"report: at most {MAX_RUNS} runs can be distinguished in a picture, got {len(runs)}")
    for run in runs:
        if run.outcome and run.recorded and run.outcome["steps"] != run.recorded.step.size:
            raise ConfigurationError(
                f"report: the files of '{run.name}' are of different runs: --json has {run.outcome['steps']} "
                f"steps, --metrics {run.recorded.step.size}; give the files of each run a name of their own"
            )
    tasks = {run.outcome["task"]: run.name for run in runs if run.outcome}
    if len(tasks) > 1:
        got = " and ".join(f"{task} ({name})" for task, name in tasks.items())
        raise ConfigurationError(f"report: runs of one task can be compared, got {got}; make a report of each")
    _shorten_names(runs)
    return runs


def _read(path: str) -> tuple[dict[str, Any] | None, Lines | None]:
    """Return the object of --json, or the lines of --metrics."""
    try:
        if path.endswith("l"):
            return None, read_lines(path)
        try:
            outcome = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError:  # several lines are no JSON
            return None, read_lines(path)
        if isinstance(outcome, dict) and "buckets" in outcome:  # one step
            return None, read_lines(path)
    except OSError as error:
        raise ConfigurationError(f"report: '{path}' cannot be read: {error.strerror}") from error
    if not isinstance(outcome, dict):
        raise ConfigurationError(f"report: '{path}' is no file that train has written with --json or --metrics")
    missing = sorted(_REQUIRED_FIELDS - set(outcome))
    if missing:
        raise ConfigurationError(
            f"report: '{path}' has no field '{missing[0]}', so train has not written it with --json; name a file of "
            "--json or --metrics"
        )
    return outcome, None


_REQUIRED_FIELDS = {
    *("task", "policy", "ranks", "hosts", "steps", "seed", "quality", "median_step_s", "phases_s", "wire_bytes"),
    *("dense_wire_bytes", "plans", "layers", "verdict"),
}


def _shorten_names(runs: Sequence[Run]) -> None:
    """Remove the common prefix of all names, and number equal names."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*(run.name for run in runs), strict=False))
    common = "".join(letters[0] for letters in same) if len(runs) > 1 else ""
    cut = max(common.rfind(mark) for mark in "-_. ") + 1
    names = [run.name[cut:] or run.name for run in runs]
    for index, run in enumerate(runs):
        run.is_single = len(runs) == 1
        number = names[: index + 1].count(names[index])
        run.name = f"{names[index]} {number}" if names.count(names[index]) > 1 else names[index]
