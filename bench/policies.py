"""Policies compared by the seconds that a training takes to a quality: which trainings that needs, in which order.

A policy that does not look at the network takes the same plans on every network. It is trained once a seed, on one
host, and its trace of plans is played again for some steps on each network, which tells what a step takes there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpicomp.bench.lab.units import parse_bandwidth
from mpicomp.bench.networks import Network

DENSE = "dense"
NETWORKS = ("50mbit/1ms", "200mbit/1ms", "1gbit/0us", "2.5gbit/0us")
QUICK_NETWORKS = ("200mbit/1ms", "2.5gbit/0us")
REPLAYED, REPLAYED_LEAST = 40, 12
"""Steps of a replay, and how many there are at least where they are slow."""

_REPLAY_S = 150.0  # that the steps of a replay may take, as long as there are enough
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
class Run:
    """A call of `mpicomp train`.

    Attributes
    ----------
    network : Network or None
        None is one host.
    replay : bool
        Whether it plays the trace of plans of the run on one host, for the seconds of a step.
    """

    task: str
    policy: str
    seed: int
    network: Network | None
    replay: bool = False

    @property
    def name(self) -> str:
        """How its files begin."""
        where = "host" if self.network is None else f"{self.network.bandwidth}-{self.network.latency}"
        what = "-replay" if self.replay else ""
        return f"{self.task}-{where}-{self.policy}-{self.seed}{what}"

    @property
    def source(self) -> "Run":
        """The run whose trace of plans a replay plays."""
        return Run(self.task, self.policy, self.seed, None)

    def __str__(self) -> str:
        """Say for people what it is."""
        what = "replay" if self.replay else f"seed {self.seed}"
        return f"{self.task}, {self.network or 'one host'}, {self.policy}, {what}"


def runs_of(policies: Sequence[str], networks: Sequence[Network], seeds: Mapping[str, Sequence[int]]) -> list[Run]:
    """Give all trainings in their order: a seed after the other, and of each what is compared next to each other.

    Parameters
    ----------
    policies : sequence of str
        Of `ARMS`.
    networks : sequence of Network
        Of the labs.
    seeds : mapping of str to sequence of int
        By task. The first one's traces are replayed.
    """
    runs = []
    for seed in sorted({seed for own in seeds.values() for seed in own}):
        for task, own in seeds.items():
            if seed not in own:
                continue
            runs += [Run(task, name, seed, None) for name in policies if not ARMS[name].looks]
            for network in networks:
                for name in policies:
                    if ARMS[name].looks:
                        runs.append(Run(task, name, seed, network))
                    elif seed == min(own):
                        runs.append(Run(task, name, seed, network, replay=True))
    return runs


def words_of(run: Run, steps: int | None, traced: Mapping[str, Any] | None, trace: str) -> list[str]:
    """Give the words after ``mpicomp`` for a run, but for the files that it writes.

    Parameters
    ----------
    run : Run
        Which.
    steps : int or None
        Of a training; None is what the task is tuned for.
    traced : mapping or None
        Of a replay: what ``train --json`` wrote for its source.
    trace : str
        Of a replay: the path of its source's metrics.
    """
    words = ["train", "--task", run.task, "--seed", str(run.seed), "--no-verdict"]
    if not run.replay:
        every = GOALS[run.task].every if steps is None else min(GOALS[run.task].every, max(1, steps // _EVALUATIONS))
        words += [] if steps is None else ["--steps", str(steps)]
        return [*words, *ARMS[run.policy].arguments, "--evaluate-every", str(every)]
    assert traced is not None
    assert run.network is not None
    words += ["--steps", str(_replayed(traced, run.network))]
    # Collectives of dense differ in nothing but time, and which is fastest depends on the network.
    return words + (list(ARMS[DENSE].arguments) if run.policy == DENSE else ["--replay", trace])


def _replayed(traced: Mapping[str, Any], network: Network) -> int:
    """Give how many steps of a trace are run on a network: fewer where they take long."""
    bits = 8 * float(traced["wire_bytes"]) / int(traced["steps"])
    fit = int(_REPLAY_S / (_COMPUTING_S + bits / parse_bandwidth(network.bandwidth)))
    return min(REPLAYED, max(REPLAYED_LEAST, fit))
