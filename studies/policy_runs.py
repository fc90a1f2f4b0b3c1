"""Policies compared by the seconds that a training takes to a quality: which runs that needs, in which order.

A policy that does not depend on the network takes the same plans on every network: it is trained once a seed, on one
host. What a step takes is timed for all policies in one job on each network, which runs their recorded plans in turn.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lab_jobs import Network
from mpicomp.bench.lab.lab_settings import parse_bandwidth

DENSE, MUON = "dense", "muon"  # the arm that all others are compared with, and `mpicomp.torch.LocalMuon`

NETWORKS = ("50mbit/1ms", "200mbit/1ms", "1gbit/0us", "2.5gbit/0us")
QUICK_NETWORKS = ("200mbit/1ms", "2.5gbit/0us")
BLOCKS = 5  # number of blocks in which the steps of each policy are timed, in turn
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
    MUON: ("--exchange", "muon", "--collective", "two-phase"),
}
"""Words for `mpicomp train` by policy."""
AS_NAMED = (DENSE, MUON)  # arms that `mpicomp bench training` times by their name, without recorded plans
_MUON_STEPS = 10  # from one of its exchanges to the next: blocks have as many


def _fixed(collective: str, **config: Any) -> tuple[str, ...]:
    return ("--compressor", json.dumps(config), "--collective", collective, "--warmup", "0")


PLANS: dict[str, tuple[str, ...]] = {
    DENSE: ARMS[DENSE],
    "dense-bf16": _fixed("scatter-reduce", id="dense", wire="bf16"),
    "qsgd8": _fixed("two-phase", id="qsgd", bits=8, rounding="nearest"),
    "qsgd4": _fixed("two-phase", id="qsgd", bits=4, rounding="nearest"),
    "qsgd3": _fixed("two-phase", id="qsgd", bits=3, rounding="nearest"),
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
NETWORK_AWARE = ("gravac", "flexible", "auto")  # policies whose plans depend on the measured network


@dataclass(frozen=True)
class Goal:
    """The target quality of a task: ``factor * last quality of dense + offset``, in ``words`` for people."""

    lower: bool  # a lower quality is the better one
    factor: float
    offset: float
    seeds: tuple[int, ...]  # unless others are named
    words: str

    def target(self, dense: float) -> float:
        return self.factor * dense + self.offset

    def reaches(self, quality: float, target: float) -> bool:
        return quality <= target if self.lower else quality >= target

    @property
    def better(self) -> str:
        return f"quality: {'lower' if self.lower else 'higher'} is better"


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
class Training:
    """A call of `mpicomp train` with an arm of the comparison, in a lab or, without a network, on one host."""

    task: str
    arm: str
    seed: int
    network: Network | None = None

    @property
    def name(self) -> str:
        """Start of the names of its files."""
        return f"{self.task}-{place_of(self.network)}-{self.arm}-{self.seed}"

    @property
    def kind(self) -> str:
        return f"seed {self.seed}"

    def __str__(self) -> str:
        return f"{self.task}, {self.network or 'one host'}, {self.arm}, {self.kind}"


def place_of(network: Network | None) -> str:
    """Return the part of file names that stands for a network."""
    return "host" if network is None else f"{network.bandwidth}-{network.latency}"


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
    """Return all runs, a seed after the other; steps are timed with the plans of a task's first seed."""
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
    """Return the words after ``mpicomp`` for timing steps of recorded plans; long steps have shorter blocks."""
    round_s = len(step_bytes) * _COMPUTING_S + 8 * sum(step_bytes.values()) / parse_bandwidth(run.network.bandwidth)
    block = min(LONGEST_BLOCK, max(SHORTEST_BLOCK, int(_TIMING_S / round_s / (BLOCKS + 1))))
    # Collectives of dense differ in nothing but time, and which is fastest depends on the network: it chooses there.
    exchanges = ",".join(name if name in AS_NAMED else f"replay:{trace}" for name, trace in traces.items())
    words = ["bench", "training", *_words_of_task(run.task), "--seed", str(run.seed), "--exchange", exchanges]
    if MUON in traces:
        block = _MUON_STEPS
        words += ["--every", str(block)]
    return [*words, "--steps", str(BLOCKS * block), "--blocks", str(BLOCKS), "--warm-up", str(block)]


def smoothed(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the centred moving mean over three values; the first and the last one stay as they are.

    So the last one reaches a target exactly when the final quality does.

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

    >>> mean_over_steps([(10, 4.0), (20, 2.0), (40, 2.0)])
    2.3333333333333335
    """
    steps, values = np.array([step for step, _ in curve], float), np.array([quality for _, quality in curve])
    if not np.isfinite(values).all():
        return None
    if steps.size == 1:
        return float(values[0])
    return float(((values[1:] + values[:-1]) / 2 * np.diff(steps)).sum() / (steps[-1] - steps[0]))
