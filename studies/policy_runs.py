"""Policies compared by the seconds that a training takes to a quality: which runs that needs, in which order.

A policy that does not look at the network takes the same plans on every network: it is trained once a seed, on one
host. What a step takes is timed for all policies in one job on each network, which runs their recorded plans in turn.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comparison
from comparison import DENSE, Goal, Training, place_of
from mpicomp.bench.lab.units import parse_bandwidth
from mpicomp.bench.measure import jobs
from mpicomp.bench.measure.jobs import CUT, DONE, FAILED, MPICOMP, read_json, read_lines
from mpicomp.bench.measure.networks import Network

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
LOOKING = ("gravac", "flexible", "auto")
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
_SHARDS = "-shards"  # behind the name of a task whose ranks have samples of their own


@dataclass(frozen=True)
class Timing:
    """A call of `mpicomp bench training`: the recorded plans of all policies in turn, for the seconds of a step.

    Attributes
    ----------
    policies : tuple of str
        Of `ARMS`.
    seed : int
        Of the trainings whose plans are run.
    """

    task: str
    policies: tuple[str, ...]
    seed: int
    network: Network

    @property
    def name(self) -> str:
        """Start of the names of its files."""
        return f"{self.task}-{place_of(self.network)}-timing-{self.seed}"

    @property
    def kind(self) -> str:
        """Kind of the run, for people."""
        return "timing"

    @property
    def sources(self) -> list[Training]:
        """The trainings whose plans it runs."""
        return [
            Training(self.task, name, self.seed, self.network if name in LOOKING else None) for name in self.policies
        ]

    def __str__(self) -> str:
        """Describe the run for people."""
        return f"{self.task}, {self.network}, {self.kind}"


Run = Training | Timing


def runs_of(policies: Sequence[str], networks: Sequence[Network], seeds: Mapping[str, Sequence[int]]) -> list[Run]:
    """Return all runs in their order: a seed after the other, and steps are timed as soon as there are plans.

    Parameters
    ----------
    policies : sequence of str
        Of `ARMS`.
    networks : sequence of Network
        Of the labs.
    seeds : mapping of str to sequence of int
        By task. Steps are timed with the plans of the first one.
    """
    runs: list[Run] = []
    for seed in sorted({seed for own in seeds.values() for seed in own}):
        for task, own in seeds.items():
            if seed not in own:
                continue
            runs += [Training(task, name, seed, None) for name in policies if name not in LOOKING]
            for network in networks:
                runs += [Training(task, name, seed, network) for name in policies if name in LOOKING]
                if seed == min(own):
                    runs.append(Timing(task, tuple(policies), seed, network))
    return runs


def words_of_training(run: Training, steps: int | None) -> list[str]:
    """Return the words after ``mpicomp`` for a training, but for the files that it writes.

    Parameters
    ----------
    run : Training
        The training.
    steps : int or None
        None is what the task is tuned for.
    """
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

    Parameters
    ----------
    run : Timing
        The timing.
    traces : mapping of str to str
        By policy, the path of its recorded plans: only those of them are timed.
    step_bytes : mapping of str to float
        By policy, how many leave a rank in a step.
    """
    block = _block(step_bytes, run.network)
    # Collectives of dense differ in nothing but time, and which is fastest depends on the network: it chooses there.
    exchanges = ",".join(DENSE if name == DENSE else f"replay:{trace}" for name, trace in traces.items())
    words = ["bench", "training", *_words_of_task(run.task), "--seed", str(run.seed), "--exchange", exchanges]
    return [*words, "--steps", str(BLOCKS * block), "--blocks", str(BLOCKS), "--warm-up", str(block)]


def _block(step_bytes: Mapping[str, float], network: Network) -> int:
    """Return the number of steps of a block: fewer where they take long."""
    bits = 8 * sum(step_bytes.values())
    round_s = len(step_bytes) * _COMPUTING_S + bits / parse_bandwidth(network.bandwidth)
    return min(LONGEST_BLOCK, max(SHORTEST_BLOCK, int(_TIMING_S / round_s / (BLOCKS + 1))))


@dataclass
class Finished(jobs.Finished):
    """Result of a training or a timing.

    Attributes
    ----------
    curve : list of tuple
        Of a training: number of steps done, and the quality after them on the share of the held-out data that the task
        has for looks on the way.
    timed : mapping
        Of a timing: by policy, the object that ``bench training --json`` wrote.
    """

    curve: list[tuple[int, float]] = field(default_factory=list)
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)


class Runner(comparison.Runner):
    """Runs trainings and timings one after the other.

    Parameters
    ----------
    folder, ranks
        See `comparison.Runner`; a lab has as many hosts.
    steps : int or None
        Steps of a training; None takes the number that each task is tuned for.
    """

    finished: dict[Run, Finished]

    def __init__(self, folder: Path, ranks: int, steps: int | None) -> None:
        super().__init__(folder, ranks)
        self._steps = steps

    def run(self, run: Run, left_s: float) -> Finished:
        """See `comparison.Runner`."""
        finished = self._train(run, left_s) if isinstance(run, Training) else self._time(run, left_s)
        self.finished[run] = finished
        return finished

    def _train(self, run: Training, left_s: float) -> Finished:
        words = words_of_training(run, self._steps)
        files = {"--json": "json", "--metrics": "jsonl"}
        finished = Finished(run, FAILED, words=words)
        self.run_job(finished, words, files, {"hosts": self.ranks}, left_s)
        return finished

    def _time(self, run: Timing, left_s: float) -> Finished:
        sources = [self.finished[own] for own in run.sources if own in self.finished]
        done = {own.run.arm: own for own in sources if isinstance(own.run, Training) and own.status == DONE}
        if not done:  # why is said there
            return Finished(run, CUT, "there are no trainings whose plans could be run")
        paths = {name: self.folder.path(own.run.name, "jsonl") for name, own in done.items()}
        step_bytes = {name: own.outcome["wire_bytes"] / own.outcome["steps"] for name, own in done.items()}
        words = words_of_timing(run, {name: str(path) for name, path in paths.items()}, step_bytes)
        told = words_of_timing(run, {name: path.name for name, path in paths.items()}, step_bytes)  # folders are moved
        digest = hashlib.blake2b(digest_size=8)
        for path in paths.values():
            digest.update(path.read_bytes())
        finished = Finished(run, FAILED, words=told)
        mark = {"hosts": self.ranks, "traces": digest.hexdigest()}
        self.run_job(finished, words, {"--json": "json"}, mark, left_s)
        return finished

    def fill(self, finished: Finished) -> bool:
        """See `comparison.Runner`."""
        name = finished.run.name
        outcome = read_json(self.folder.path(name, "json"))
        if isinstance(finished.run, Training):
            return _fill_training(finished, outcome, read_lines(self.folder.path(name, "jsonl")))
        return _fill_timing(finished, finished.run, outcome)

    def command(self, run: Run, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """See `comparison.Runner`."""
        if run.network is None:
            return super().command(run, words)
        links = ["--bandwidth", run.network.bandwidth, "--latency", run.network.latency]
        return [*MPICOMP, "lab", "run", "--hosts", str(self.ranks), *links, "--", *MPICOMP, *words], {}

    def summary(self, finished: Finished) -> str:
        """See `comparison.Runner`."""
        if finished.timed:
            return "; s a step: " + ", ".join(f"{name} {row['median_s']:.4g}" for name, row in finished.timed.items())
        return f", {float(finished.outcome['median_step_s']):.4g} s a step, quality {finished.quality:.4f}"


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
    names = {own.arm: DENSE if own.arm == DENSE else f"{own.name}.jsonl" for own in run.sources}
    finished.timed = {policy: rows[name] for policy, name in names.items() if name in rows}
    return len(finished.timed) > 0
