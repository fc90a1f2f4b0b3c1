"""Policies compared by the seconds that a training takes to a quality: which trainings that needs, in which order.

A policy that does not look at the network takes the same plans on every network: it is trained once a seed, on one
host. What a step takes is timed for all policies in one job on each network, which runs their recorded plans in turn.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpicomp.bench.lab.units import parse_bandwidth
from mpicomp.bench.measure.networks import Network

DENSE = "dense"
NETWORKS = ("50mbit/1ms", "200mbit/1ms", "1gbit/0us", "2.5gbit/0us")
QUICK_NETWORKS = ("200mbit/1ms", "2.5gbit/0us")
BLOCKS = 5
"""In which the steps of each policy are timed, in turn."""
LONGEST_BLOCK, SHORTEST_BLOCK = 8, 3
"""Steps of a block, and of warming up, where they are quick and where they are slow."""

_TIMING_S = 150.0  # that timing may take, as long as blocks are not too short
_COMPUTING_S = 0.2  # of a step, to tell how many fit
_EVALUATIONS = 20  # at least, where the number of steps was given


@dataclass(frozen=True)
class Arm:
    """A policy as `mpicomp train` is told of it.

    Attributes
    ----------
    arguments : tuple of str
        Words for `mpicomp train`.
    looks : bool
        Whether its plans depend on what the network is measured to be.
    """

    arguments: tuple[str, ...]
    looks: bool


_PINNED = ("--compressor", "topk", "--ratio", "0.01", "--collective", "allgather")
_TWICE = ("--compressor", "topk", "--ratio", "0.02", "--collective", "allgather")  # it halves the bytes of that

# Made for trainings of some hundred steps: with the published windows of 500 steps nothing would be found in them, and
# with a least gain of 0.7 hardly anything would be compressed under error feedback.
_GRAVAC = {"id": "gravac", "least": 0.01, "scaling": "geometric", "window": 10, "epsilon": 0.1}
_SCHEDULE = {"id": "schedule", "begin": 0.25, "end": 0.01, "steps": 60}
_FLEXIBLE = {"id": "flexible", "every": 50}

ARMS = {
    DENSE: Arm(("--compressor", "dense"), looks=False),
    "static": Arm(_PINNED, looks=False),
    "schedule": Arm(("--policy", json.dumps(_SCHEDULE), *_PINNED), looks=False),
    "gravac": Arm(("--policy", json.dumps(_GRAVAC)), looks=True),
    "accordion": Arm(("--policy", "accordion", *_PINNED), looks=False),
    "lgreco": Arm(("--policy", "lgreco", *_TWICE), looks=False),
    "flexible": Arm(("--policy", json.dumps(_FLEXIBLE)), looks=True),
    "auto": Arm((), looks=True),
}


@dataclass(frozen=True)
class Goal:
    """What counts as the quality of dense in a task.

    Attributes
    ----------
    lower : bool
        Whether a lower quality is the better one.
    factor, offset : float
        The target is ``factor * last quality of dense + offset``.
    every : int
        Steps from one measurement of quality to the next.
    seeds : tuple of int
        Where none are named.
    words : str
        The target, for people.
    """

    lower: bool
    factor: float
    offset: float
    every: int
    seeds: tuple[int, ...]
    words: str

    def target(self, dense: float) -> float:
        """Give the quality that is to be reached, from that of dense in the end with the same seed."""
        return self.factor * dense + self.offset

    def reaches(self, quality: float, target: float) -> bool:
        """Tell whether a quality is at least as good as the target."""
        return quality <= target if self.lower else quality >= target


GOALS = {
    "digits": Goal(False, 1.0, -0.015, 5, (0, 1, 2, 3, 4), "the last held-out accuracy of dense less 0.015"),
    "text-lstm": Goal(True, 1.01, 0.0, 10, (0, 1, 2), "1.01 times the last held-out loss of dense"),
}


@dataclass(frozen=True)
class Training:
    """A call of `mpicomp train`.

    Attributes
    ----------
    network : Network or None
        None is one host.
    """

    task: str
    policy: str
    seed: int
    network: Network | None

    @property
    def name(self) -> str:
        """How its files begin."""
        return f"{self.task}-{_where(self.network)}-{self.policy}-{self.seed}"

    @property
    def kind(self) -> str:
        """What it is."""
        return f"seed {self.seed}"

    def __str__(self) -> str:
        """Say for people what it is."""
        return f"{self.task}, {self.network or 'one host'}, {self.policy}, {self.kind}"


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
        """How its files begin."""
        return f"{self.task}-{_where(self.network)}-timing"

    @property
    def kind(self) -> str:
        """What it is."""
        return "timing"

    @property
    def sources(self) -> list[Training]:
        """The trainings whose plans it runs."""
        return [
            Training(self.task, name, self.seed, self.network if ARMS[name].looks else None) for name in self.policies
        ]

    def __str__(self) -> str:
        """Say for people what it is."""
        return f"{self.task}, {self.network}, {self.kind}"


Run = Training | Timing


def _where(network: Network | None) -> str:
    return "host" if network is None else f"{network.bandwidth}-{network.latency}"


def runs_of(policies: Sequence[str], networks: Sequence[Network], seeds: Mapping[str, Sequence[int]]) -> list[Run]:
    """Give all runs in their order: a seed after the other, and steps are timed as soon as there are plans.

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
            runs += [Training(task, name, seed, None) for name in policies if not ARMS[name].looks]
            for network in networks:
                runs += [Training(task, name, seed, network) for name in policies if ARMS[name].looks]
                if seed == min(own):
                    runs.append(Timing(task, tuple(policies), seed, network))
    return runs


def words_of_training(run: Training, steps: int | None) -> list[str]:
    """Give the words after ``mpicomp`` for a training, but for the files that it writes.

    Parameters
    ----------
    run : Training
        Which.
    steps : int or None
        None is what the task is tuned for.
    """
    every = GOALS[run.task].every if steps is None else min(GOALS[run.task].every, max(1, steps // _EVALUATIONS))
    words = ["train", "--task", run.task, "--seed", str(run.seed), "--no-verdict"]
    words += [] if steps is None else ["--steps", str(steps)]
    return [*words, *ARMS[run.policy].arguments, "--evaluate-every", str(every)]


def words_of_timing(run: Timing, traces: Mapping[str, str], step_bytes: Mapping[str, float]) -> list[str]:
    """Give the words after ``mpicomp`` for timing steps, but for the file that it writes.

    Parameters
    ----------
    run : Timing
        Which.
    traces : mapping of str to str
        By policy, the path of its recorded plans: only those of them are timed.
    step_bytes : mapping of str to float
        By policy, how many leave a rank in a step.
    """
    block = _block(step_bytes, run.network)
    # Collectives of dense differ in nothing but time, and which is fastest depends on the network: it chooses there.
    exchanges = ",".join(DENSE if name == DENSE else f"replay:{trace}" for name, trace in traces.items())
    words = ["bench", "training", "--task", run.task, "--seed", str(run.seed), "--exchange", exchanges]
    return [*words, "--steps", str(BLOCKS * block), "--blocks", str(BLOCKS), "--warm-up", str(block)]


def _block(step_bytes: Mapping[str, float], network: Network) -> int:
    """Give how many steps make a block: fewer where they take long."""
    bits = 8 * sum(step_bytes.values())
    round_s = len(step_bytes) * _COMPUTING_S + bits / parse_bandwidth(network.bandwidth)
    return min(LONGEST_BLOCK, max(SHORTEST_BLOCK, int(_TIMING_S / round_s / (BLOCKS + 1))))
