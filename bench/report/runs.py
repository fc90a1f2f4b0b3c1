"""Runs: files of --json and --metrics with the same name before the ending."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from mpicomp.bench.measure import run_fields
from mpicomp.bench.measure.run_fields import PHASES, RunObject
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError

Array = NDArray[np.float64]

MAX_RUNS = 8  # as many as there are colors that can be distinguished
_MAX_START_STEPS = 5
_NOT_JSON = re.compile(rb"(?<=[:\[,])\s*-?(NaN|Infinity)(?=\s*[,\]}])")  # numbers that Python's json module writes


class Bucket(msgspec.Struct, gc=False):
    """The fields of a bucket in a line of --metrics that the report reads."""

    numel: int
    compressor: msgspec.Raw
    collective: str


class Line(run_fields.Line, kw_only=True, gc=False):
    """A line of --metrics, as far as the report reads it."""

    step: int
    wire_bytes: float
    dense_wire_bytes: float
    buckets: list[Bucket]
    skipped: bool = False
    lost_ranks: list[int] = msgspec.field(default_factory=list)


@dataclass
class Run:
    """One training, by its object of --json, its lines of --metrics, or both."""

    name: str  # short and unique
    outcome: RunObject | None = None
    lines: list[Line] = field(default_factory=list)

    def column(self, name: str) -> Array:
        """Return a number of each line; NaN where it is null."""
        return np.array([getattr(line, name) for line in self.lines], np.float64)

    @property
    def start(self) -> int:
        """Number of first steps without seconds of their own: they compile, agree and grow buffers."""
        return min(_MAX_START_STEPS, len(self.lines) // 4)

    @property
    def elapsed(self) -> Array:
        """Seconds since the beginning at the end of every step; a first step counts as the median step."""
        seconds = self.column("seconds")
        seconds[: self.start] = self.step_s
        return np.cumsum(seconds)

    @property
    def step_s(self) -> float:
        """Median seconds of a step: of the slowest rank with --json, of rank 0 without."""
        if self.outcome is not None:
            return self.outcome.median_step_s
        return float(np.median(self.column("seconds")[self.start :]))

    @property
    def phases_s(self) -> dict[str, float]:
        if self.outcome is not None:
            return self.outcome.phases_s
        rows = [[line.phases_s.get(name, 0.0) for name in PHASES] for line in self.lines[self.start :]]
        return dict(zip(PHASES, np.median(rows, axis=0).tolist(), strict=True))

    @property
    def bytes_per_step(self) -> tuple[float, float]:
        """Bytes that left a rank in a step, and those of a dense ring."""
        if self.outcome is not None:
            steps = self.outcome.steps
            return self.outcome.wire_bytes / steps, self.outcome.dense_wire_bytes / steps
        return float(self.column("wire_bytes").mean()), float(self.column("dense_wire_bytes").mean())

    @cached_property
    def shares(self) -> dict[str, Array]:
        """For each plan the share of the elements that it carried, over steps; the largest comes first."""
        words: dict[tuple[bytes, str], str] = {}
        carried: dict[str, Array] = {}
        for row, line in enumerate(self.lines):
            numel = sum(bucket.numel for bucket in line.buckets)
            for bucket in line.buckets:
                plan = bytes(bucket.compressor), bucket.collective
                if plan not in words:
                    words[plan] = plan_in_words(json.loads(plan[0]), plan[1])
                carried.setdefault(words[plan], np.zeros(len(self.lines)))[row] += bucket.numel / numel
        return dict(sorted(carried.items(), key=lambda plan: -plan[1].sum()))

    @property
    def plans(self) -> Counter[str]:
        """Plans, each with its share of the elements exchanged."""
        if self.lines:
            whole = sum(float(share.sum()) for share in self.shares.values())
            return Counter({name: float(share.sum()) / whole for name, share in self.shares.items()})
        plans: Counter[str] = Counter()
        for plan in self.outcome.plans if self.outcome is not None else ():
            plans[plan_in_words(plan["compressor_config"], plan["collective"])] += plan["share"]  # type: ignore[assignment]
        return plans

    @property
    def is_dense(self) -> bool:
        """Whether dense exchange was asked for, not chosen."""
        is_chosen = self.outcome is not None and self.outcome.policy != "static"
        return not is_chosen and all(plan.partition(" ")[0] == "dense" for plan in self.plans)

    @property
    def quality(self) -> tuple[str, str]:
        """The name of the quality, and whether ``higher`` or ``lower`` is better; the loss without --json."""
        if self.outcome is None:
            return "training loss", "lower"
        return self.outcome.quality["name"], self.outcome.quality["better"]


def plan_in_words(compressor: dict[str, object], collective: str) -> str:
    """Return the compressor, its ratio and the collective.

    >>> plan_in_words({"id": "topk", "ratio": 0.01, "layers": {"b": 1.0}}, "allgather")
    'topk by layer by allgather'
    """
    ratio = compressor.get("ratio")
    size = f" {ratio:.3g}" if isinstance(ratio, float | int) else ""
    return f"{compressor.get('id', '?')}{' by layer' if compressor.get('layers') else size} by {collective}"


def read_lines(path: str) -> list[Line]:
    """Read a file of --metrics; a last line that was torn as its job ended is left out."""
    lines = []
    decode = msgspec.json.Decoder(Line).decode
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            try:
                try:
                    lines.append(decode(text))
                except msgspec.DecodeError:
                    lines.append(decode(_NOT_JSON.sub(b"null", text)))
            except msgspec.DecodeError as error:
                if text.endswith(b"\n"):
                    raise ConfigurationError(
                        f"report: line {number} of '{path}' is no step of --metrics ({error}); name files that "
                        "train has written with --json or --metrics"
                    ) from error
    if not lines:
        raise ConfigurationError(f"report: '{path}' holds no step; name a file that train has written with --metrics")
    return lines


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Read files; those whose names are the same before the ending are one run."""
    found: dict[str, Run] = {}
    stems = {str(Path(path).with_suffix("")): Path(path).stem for path in paths}
    for path in dict.fromkeys(paths):
        key = str(Path(path).with_suffix(""))
        read = _read(path)
        unique = list(stems.values()).count(stems[key]) == 1
        run = found.setdefault(key, Run(stems[key] if unique else key))
        if (run.outcome and isinstance(read, RunObject)) or (run.lines and isinstance(read, list)):
            raise ConfigurationError(
                f"report: two files of the run '{key}' are of the same kind; name one of --json and one of --metrics"
            )
        if isinstance(read, RunObject):
            run.outcome = read
        else:
            run.lines = read
    runs = list(found.values())
    if len(runs) > MAX_RUNS:
        raise ConfigurationError(f"report: at most {MAX_RUNS} runs can be distinguished in a picture, got {len(runs)}")
    for run in runs:
        if run.outcome and run.lines and run.outcome.steps != len(run.lines):
            raise ConfigurationError(
                f"report: the files of '{run.name}' are of different runs: --json has {run.outcome.steps} "
                f"steps, --metrics {len(run.lines)}; name the files of each run differently"
            )
    tasks = {run.outcome.task: run.name for run in runs if run.outcome}
    if len(tasks) > 1:
        got = " and ".join(f"{task} ({name})" for task, name in tasks.items())
        raise ConfigurationError(f"report: runs of one task can be compared, got {got}; make a report of each")
    return runs


def _read(path: str) -> RunObject | list[Line]:
    try:
        if path.endswith("l"):
            return read_lines(path)
        try:
            outcome = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError:  # several lines are no JSON
            return read_lines(path)
        if isinstance(outcome, dict) and "buckets" in outcome:  # one step
            return read_lines(path)
    except OSError as error:
        raise ConfigurationError(f"report: '{path}' cannot be read: {error.strerror}") from error
    try:
        return msgspec.convert(outcome, RunObject)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"report: '{path}' was not written by train ({error}); name a file of --json or --metrics"
        ) from error
