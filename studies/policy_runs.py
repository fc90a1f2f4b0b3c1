"""Policies compared by the seconds that a training takes to a quality: which runs that needs, in which order.

A policy that does not depend on the network takes the same plans on every network: it is trained once a seed, on one
host. What a step takes is timed for all policies in one job on each network, which runs their recorded plans in turn.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from comparison import DENSE, Comparison, Goal, Training, finite, place_of
from lab_jobs import CUT, DONE, MPICOMP, Finished, Network, lab_words, read_json, read_lines
from mpicomp.bench.lab.units import parse_bandwidth

NETWORKS = ("50mbit/1ms", "200mbit/1ms", "1gbit/0us", "2.5gbit/0us")
QUICK_NETWORKS = ("200mbit/1ms", "2.5gbit/0us")
BLOCKS = 5
"""Number of blocks in which the steps of each policy are timed, in turn."""
LONGEST_BLOCK, SHORTEST_BLOCK = 8, 3
"""Steps of a block, and of warming up, where they are quick and where they are slow."""

_TIMING_S = 150.0  # seconds that timing may take, as long as blocks are not too short
_COMPUTING_S = 0.2  # assumed seconds of computation in a step, from which the number of steps that fit is taken
_EVALUATIONS = 20  # evaluations of a training, at least, where the number of steps was given

_PINNED = ("--compressor", "topk", "--ratio", "0.01", "--collective", "allgather")
_TWICE = ("--compressor", "topk", "--ratio", "0.02", "--collective", "allgather")  # it halves the bytes of that

# Made for trainings of some hundred steps: with the published windows of 500 steps nothing would be found in them, and
# with a least gain of 0.7 hardly anything would be compressed under error feedback.
_GRAVAC = {"id": "gravac", "least": 0.01, "scaling": "geometric", "window": 10, "epsilon": 0.1}
_SCHEDULE = {"id": "schedule", "begin": 0.25, "end": 0.01, "steps": 60}
_FLEXIBLE = {"id": "flexible", "every": 50}

ARMS: dict[str, tuple[str, ...]] = {
    DENSE: ("--compressor", "dense"),
    "static": _PINNED,
    "schedule": ("--policy", json.dumps(_SCHEDULE), *_PINNED),
    "gravac": ("--policy", json.dumps(_GRAVAC)),
    "accordion": ("--policy", "accordion", *_PINNED),
    "lgreco": ("--policy", "lgreco", *_TWICE),
    "flexible": ("--policy", json.dumps(_FLEXIBLE)),
    "auto": (),
}
"""Words for `mpicomp train` by policy."""


def _fixed(collective: str, **config: Any) -> tuple[str, ...]:
    """Return the words for one plan in all steps."""
    return ("--compressor", json.dumps(config), "--collective", collective, "--warmup", "0")


PLANS: dict[str, tuple[str, ...]] = {
    DENSE: ARMS[DENSE],
    "dense-bf16": _fixed("scatter-reduce", id="dense", wire="bf16"),
    "qsgd8": _fixed("two-phase", id="qsgd", bits=8, rounding="nearest"),
    "qsgd4": _fixed("two-phase", id="qsgd", bits=4, rounding="nearest"),
    "qsgd2": _fixed("two-phase", id="qsgd", bits=2, rounding="nearest"),
    "onebit": _fixed("two-phase", id="onebit"),
    "powersgd4": _fixed("auto", id="powersgd", rank=4),
    "topk10": _fixed("allgather", id="topk", ratio=0.1, wire="bf16"),
    "topk10q4": _fixed("allgather", id="topk", ratio=0.1, wire="q4"),
    "topk3": _fixed("allgather", id="topk", ratio=0.03, wire="bf16"),
    "topk3q4": _fixed("allgather", id="topk", ratio=0.03, wire="q4"),
    "topk1": _fixed("allgather", id="topk", ratio=0.01),
    "topk1q4": _fixed("allgather", id="topk", ratio=0.01, wire="q4"),
    "topk03q4": _fixed("allgather", id="topk", ratio=0.003, wire="q4"),
    "star3": _fixed("star-topk", id="topk", ratio=0.03),
}
"""Words for `mpicomp train` by fixed plan."""
NETWORK_AWARE = ("gravac", "flexible", "auto")
"""Policies whose plans depend on the measured network."""

GOALS = {
    "digits": Goal(False, 1.0, -0.015, (0, 1, 2, 3, 4), "the last held-out accuracy of dense less 0.015"),
    "digits-shards": Goal(False, 1.0, -0.015, (0, 1, 2, 3, 4), "the last held-out accuracy of dense less 0.015"),
    "text-lstm": Goal(True, 1.01, 0.0, (0, 1, 2), "1.01 times the last held-out loss of dense"),
    "text-gpt": Goal(True, 1.01, 0.0, (0, 1, 2), "1.01 times the last held-out loss of dense"),
}
EVALUATE_EVERY = {"digits": 5, "digits-shards": 5, "text-lstm": 10, "text-gpt": 10}
"""Steps from one measurement of quality to the next."""
_STEPS = {"text-gpt": 120}  # of a training, where those that a task is tuned for take too long
_SHARDS = "-shards"  # ends the name of a task whose ranks have samples of their own

Curve = Sequence[tuple[int, float]]
"""Number of steps done, ascending, and the quality after them on the held-out data of looks on the way."""


@dataclass(frozen=True)
class Timing:
    """A call of `mpicomp bench training`: the plans that a seed's trainings recorded, in turn, for step seconds."""

    task: str
    policies: tuple[str, ...]  # arms
    seed: int
    network: Network

    kind = "timing"

    @property
    def name(self) -> str:
        """Start of the names of its files."""
        return f"{self.task}-{place_of(self.network)}-timing-{self.seed}"

    @property
    def sources(self) -> list[Training]:
        """The trainings whose plans it runs."""
        return [
            Training(self.task, name, self.seed, self.network if name in NETWORK_AWARE else None)
            for name in self.policies
        ]

    def __str__(self) -> str:
        return f"{self.task}, {self.network}, {self.kind}"


Run = Training | Timing


def runs_of(policies: Sequence[str], networks: Sequence[Network], seeds: Mapping[str, Sequence[int]]) -> list[Run]:
    """Return all runs in their order: a seed after the other, and steps are timed as soon as there are plans.

    ``seeds`` are by task. Steps are timed with the plans of the first one.
    """
    runs: list[Run] = []
    for seed in sorted({seed for of_task in seeds.values() for seed in of_task}):
        for task, of_task in seeds.items():
            if seed not in of_task:
                continue
            runs += [Training(task, name, seed, None) for name in policies if name not in NETWORK_AWARE]
            for network in networks:
                runs += [Training(task, name, seed, network) for name in policies if name in NETWORK_AWARE]
                if seed == min(of_task):
                    runs.append(Timing(task, tuple(policies), seed, network))
    return runs


def words_of_training(run: Training, steps: int | None) -> list[str]:
    """Return the words after ``mpicomp`` for a training, but for the files that it writes."""
    every = EVALUATE_EVERY[run.task]
    if steps is not None:
        every = min(every, max(1, steps // _EVALUATIONS))
    steps = _STEPS.get(run.task) if steps is None else steps
    words = ["train", *_words_of_task(run.task), "--seed", str(run.seed), "--no-verdict"]
    words += [] if steps is None else ["--steps", str(steps)]
    return [*words, *(ARMS | PLANS)[run.arm], "--evaluate-every", str(every)]


def _words_of_task(task: str) -> list[str]:
    shards = ["--shards"] if task.endswith(_SHARDS) else []
    return ["--task", task.removesuffix(_SHARDS), *shards]


def words_of_timing(run: Timing, traces: Mapping[str, str], step_bytes: Mapping[str, float]) -> list[str]:
    """Return the words after ``mpicomp`` for timing steps, but for the file that it writes.

    By policy there are the path of its recorded plans, ``traces``, and how many bytes leave a rank in a step: where
    that takes long, blocks have fewer steps.
    """
    round_s = len(step_bytes) * _COMPUTING_S + 8 * sum(step_bytes.values()) / parse_bandwidth(run.network.bandwidth)
    block = min(LONGEST_BLOCK, max(SHORTEST_BLOCK, int(_TIMING_S / round_s / (BLOCKS + 1))))
    # Collectives of dense differ in nothing but time, and which is fastest depends on the network: it chooses there.
    exchanges = ",".join(DENSE if name == DENSE else f"replay:{trace}" for name, trace in traces.items())
    words = ["bench", "training", *_words_of_task(run.task), "--seed", str(run.seed), "--exchange", exchanges]
    return [*words, "--steps", str(BLOCKS * block), "--blocks", str(BLOCKS), "--warm-up", str(block)]


class Trainings(Comparison):
    """Trainings and timings with as many hosts as ranks.

    The outcome of a training is the object of ``train --json``, with its ``curve``; of a timing ``timed``, by policy
    the row of ``bench training --json``.
    """

    def __init__(self, folder: Path, hosts: int, networks: Sequence[Network], steps: int | None) -> None:
        super().__init__(folder, hosts)
        self.networks = networks
        self._steps = steps  # None: what each task is tuned for

    def run(self, run: Run, left_s: float) -> Finished:
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
        outcome = read_json(self.folder.path(run.name, "json"))
        try:
            if isinstance(run, Timing):
                rows = {Path(row["exchange"]).name: row for row in outcome["rows"]}  # of a path the file
                names = {source.arm: DENSE if source.arm == DENSE else f"{source.name}.jsonl" for source in run.sources}
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
        if run.network is None:
            return super().command(run, words)
        return [*lab_words(self.ranks, run.network), *MPICOMP, *words], {}

    def summary(self, finished: Finished) -> str:
        outcome = finished.outcome
        if "timed" in outcome:
            return "; s a step: " + ", ".join(f"{name} {row['median_s']:.4g}" for name, row in outcome["timed"].items())
        return f", {float(outcome['median_step_s']):.4g} s a step, quality {outcome['quality']:.4f}"

    # Results

    def of(self, task: str, network: Network) -> list[Finished]:
        """Return the runs of a task that count on a network."""
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


def smoothed(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the centred moving mean over three values; the first and the last one stay as they are.

    So the last one reaches a target exactly when the final quality does.

    Examples
    --------
    >>> smoothed([4.0, 1.0, 1.0, 7.0]).tolist()
    [4.0, 2.0, 3.0, 7.0]
    """
    found = np.array(values, float)
    found[1:-1] = (found[:-2] + found[1:-1] + found[2:]) / 3
    return found


def steps_to(curve: Curve, target: float, lower: bool) -> float | None:
    """Return the first step at which a curve reaches a target; None where it does not.

    The curve is smoothed, made monotone (the best so far), and linear between measurements. Its first measurement is
    returned where that is good enough: what was before is not known. Values that are not finite are the worst.

    Examples
    --------
    >>> steps_to([(10, 4.0), (20, 3.0), (30, 2.0)], 2.5, lower=True)
    25.0
    """
    sign = 1.0 if lower else -1.0
    values = np.array([sign * quality for _, quality in curve])
    values[~np.isfinite(values)] = np.inf
    best = np.minimum.accumulate(smoothed(values.tolist()))
    reached = np.flatnonzero(best <= sign * target)
    if reached.size == 0:
        return None
    place = int(reached[0])
    if place == 0 or math.isinf(best[place - 1]):
        return float(curve[place][0])
    share = (best[place - 1] - sign * target) / (best[place - 1] - best[place])
    return float(curve[place - 1][0] + share * (curve[place][0] - curve[place - 1][0]))


def mean_over_steps(curve: Curve) -> float | None:
    """Return the mean of a curve over steps, from its first measurement to the last: the area under it over its width.

    Examples
    --------
    >>> mean_over_steps([(10, 4.0), (20, 2.0), (40, 2.0)])
    2.3333333333333335
    """
    steps, values = np.array([step for step, _ in curve], float), np.array([quality for _, quality in curve])
    if not np.isfinite(values).all():
        return None
    if steps.size == 1:
        return float(values[0])
    return float(((values[1:] + values[:-1]) / 2 * np.diff(steps)).sum() / (steps[-1] - steps[0]))
