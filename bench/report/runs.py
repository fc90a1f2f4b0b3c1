"""Runs: files of --json and --metrics with the same name before the ending."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpicomp.bench.report.section_parts import Array, Bins, capital
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError

PHASES = ("compute", "compress", "exchange", "decode", "update", "other")
"""Parts of a step, in the order in which they are drawn."""

_BUFFER_BYTES = 1 << 20
_NAN = float("nan")
_NOT_JSON = re.compile(rb"(?<=[:\[,])\s*-?(NaN|Infinity)(?=\s*[,\]}])")  # numbers that Python's json module writes


class _Layer(msgspec.Struct, gc=False):
    name: str
    numel: int
    ratio: float
    gain: float | None = None


class _Bucket(msgspec.Struct, gc=False):
    bucket: int
    numel: int
    compressor: msgspec.Raw
    collective: str
    phases_s: dict[str, float]
    layers: list[_Layer]
    ratio: float = msgspec.field(name="ratio_reached")
    gain: float | None = None
    energy: float | None = None
    predicted_s: float | None = None

    @property
    def name(self) -> str:
        return f"bucket {self.bucket}"


class _Line(msgspec.Struct, gc=False):
    step: int
    seconds: float
    phases_s: dict[str, float]
    wire_bytes: float
    dense_wire_bytes: float
    buckets: list[_Bucket]
    loss: float | None = None
    quality: float | None = None
    skipped: bool = False
    lost_ranks: list[int] = []


@dataclass
class Rows:
    """Values of layers, or of buckets, over steps."""

    names: list[str]  # in the order of their first step
    numels: list[int]  # elements of each
    ratio: Array  # NaN where nothing was recorded
    gain: Array


@dataclass
class Lines:
    """Records of rank 0, a value a step; NaN stands for what was not recorded."""

    step: Array  # numbers of the steps
    seconds: Array
    loss: Array
    quality: Array
    wire_bytes: Array
    dense_wire_bytes: Array
    phases: Array  # seconds of `PHASES`
    ratio: Array  # kept fraction of the whole
    delay: Array  # energy in residuals after a step over the energy that it sent
    predicted: Array  # seconds of the buckets that have a prediction
    measured: Array
    layers: Rows
    buckets: Rows
    plans: list[str]  # the one that carried most comes first
    shares: Array  # share of a step's elements that each plan carried
    skipped: list[int]  # steps that delivered zeros
    lost: list[tuple[int, int]]  # steps before which ranks died, each with a rank


class _Columns:
    """Collects layers, or buckets, whose names may differ from step to step."""

    def __init__(self) -> None:
        self._numels: dict[str, int] = {}
        self._rows: list[tuple[NDArray[np.intp], Array, Array]] = []
        self._names: list[str] = []  # of the last step
        self._columns = np.zeros(0, np.intp)

    def add(self, parts: Sequence[_Layer | _Bucket]) -> None:
        names = [part.name for part in parts]
        if names != self._names:
            for part in parts:
                self._numels.setdefault(part.name, part.numel)
            column = {name: index for index, name in enumerate(self._numels)}
            self._names, self._columns = names, np.array([column[name] for name in names], np.intp)
        # As arrays at once: to keep millions of Python's numbers takes longer than to read them. None becomes NaN.
        ratios, gains = [part.ratio for part in parts], [part.gain for part in parts]
        self._rows.append((self._columns, np.array(ratios, np.float64), np.array(gains, np.float64)))

    def rows(self) -> Rows:
        ratio, gain = np.full((2, len(self._rows), len(self._numels)), np.nan)
        for step, (columns, ratios, gains) in enumerate(self._rows):
            ratio[step, columns] = ratios
            gain[step, columns] = gains
        return Rows(list(self._numels), list(self._numels.values()), ratio, gain)


def read_lines(path: str) -> Lines:
    """Read a file of --metrics."""
    numbers: list[dict[str, float]] = []
    phases: list[list[float]] = []
    layers, buckets = _Columns(), _Columns()
    carried: list[Counter[tuple[bytes, str]]] = []
    skipped: list[int] = []
    lost: list[tuple[int, int]] = []
    for line in _decoded(path):
        numbers.append(_numbers(line))
        phases.append([line.phases_s.get(name, 0.0) for name in PHASES])
        layers.add([layer for bucket in line.buckets for layer in bucket.layers])
        buckets.add(line.buckets)
        carried.append(Counter())
        for bucket in line.buckets:
            carried[-1][bytes(bucket.compressor), bucket.collective] += bucket.numel
        skipped += [line.step] if line.skipped else []
        lost += [(line.step, rank) for rank in line.lost_ranks]
    if not numbers:
        raise ConfigurationError(f"report: '{path}' holds no step; name a file that train has written with --metrics")
    plans, shares = _shares(carried)
    columns = {name: np.array([row[name] for row in numbers], np.float64) for name in numbers[0]}
    parts = {"layers": layers.rows(), "buckets": buckets.rows(), "plans": plans, "shares": shares}
    return Lines(**columns, **parts, phases=np.array(phases), skipped=skipped, lost=lost)  # type: ignore[arg-type]


def _decoded(path: str) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        for number, text in enumerate(file, 1):
            try:
                try:
                    line = decode(text)
                except msgspec.DecodeError:
                    line = decode(_NOT_JSON.sub(b"null", text))
            except msgspec.DecodeError as error:
                if text.endswith(b"\n"):
                    raise ConfigurationError(
                        f"report: line {number} of '{path}' is no step of --metrics ({error}); name files that "
                        "train has written with --json or --metrics"
                    ) from error
            else:
                yield line


def _numbers(line: _Line) -> dict[str, float]:
    numel = kept = waiting = sent = predicted = measured = 0.0
    for bucket in line.buckets:
        numel += bucket.numel
        kept += bucket.numel * bucket.ratio
        if bucket.gain is not None and bucket.energy is not None:
            waiting += (1 - bucket.gain) * bucket.energy
            sent += bucket.gain * bucket.energy
        if bucket.predicted_s is not None:
            predicted += bucket.predicted_s
            measured += sum(bucket.phases_s.values())
    has_prediction = any(bucket.predicted_s is not None for bucket in line.buckets)
    return {
        "step": line.step,
        "seconds": line.seconds,
        "loss": _NAN if line.loss is None else line.loss,
        "quality": _NAN if line.quality is None else line.quality,
        "wire_bytes": line.wire_bytes,
        "dense_wire_bytes": line.dense_wire_bytes,
        "ratio": kept / numel if numel else _NAN,
        "delay": waiting / sent if sent > 0 else _NAN,
        "predicted": predicted if has_prediction else _NAN,
        "measured": measured if has_prediction else _NAN,
    }


def _shares(carried: list[Counter[tuple[bytes, str]]]) -> tuple[list[str], Array]:
    """Return plans in words and their shares of every step's elements."""
    words = {plan: plan_in_words(json.loads(plan[0]), plan[1]) for step in carried for plan in step}
    totals: Counter[str] = Counter()
    for step in carried:
        for plan, numel in step.items():
            totals[words[plan]] += numel
    names = [name for name, _ in totals.most_common()]
    shares = np.zeros((len(carried), len(names)))
    for row, step in zip(shares, carried, strict=True):
        for plan, numel in step.items():
            row[names.index(words[plan])] += numel
    return names, shares / np.maximum(shares.sum(axis=1, keepdims=True), 1)


def plan_in_words(compressor: dict[str, object], collective: str) -> str:
    """Return the compressor, its ratio and the collective.

    >>> plan_in_words({"id": "topk", "ratio": 0.01}, "allgather")
    'topk 0.01 by allgather'
    >>> plan_in_words({"id": "topk", "ratio": 0.01, "layers": {"b": 1.0}}, "allgather")
    'topk by layer by allgather'
    """
    ratio = compressor.get("ratio")
    size = f" {ratio:.3g}" if isinstance(ratio, float | int) else ""
    return f"{compressor.get('id', '?')}{' by layer' if compressor.get('layers') else size} by {collective}"


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
        return Bins.of(self.lines.step.size)

    @property
    def prefix(self) -> str:
        """Start of what a sentence lists for each run."""
        return "" if self.is_single else f"{self.name} "

    def titled(self, words: str) -> str:
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
                f"steps, --metrics {run.recorded.step.size}; name the files of each run differently"
            )
    tasks = {run.outcome["task"]: run.name for run in runs if run.outcome}
    if len(tasks) > 1:
        got = " and ".join(f"{task} ({name})" for task, name in tasks.items())
        raise ConfigurationError(f"report: runs of one task can be compared, got {got}; make a report of each")
    _shorten_names(runs)
    return runs


def _read(path: str) -> tuple[dict[str, Any] | None, Lines | None]:
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
