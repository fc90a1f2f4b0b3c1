"""Learned codes compared with what they are to replace: which trainings that needs, and as which jobs they are run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mpicomp.bench.measure.jobs import DONE, FAILED, Folder, Job, Start, on_one_host, read_json, read_lines
from mpicomp.bench.measure.jobs import Finished as Ended

from mpicomp.compressors.lgc import LGC

DENSE = "dense"
STEPS = 900
"""Of a training, if not told otherwise."""
PHASES = (LGC().dense_steps, LGC().training_steps)
"""Steps of the phases before codes travel, if not told otherwise."""

_LOOKS = 20  # at ranks' gradients, in a training


@dataclass(frozen=True)
class Goal:
    """What is compared on a task.

    Attributes
    ----------
    ratio : float
        Of all exchanges that have one.
    lower : bool
        Whether a lower quality is the better one.
    factor, offset : float
        What an exchange may lose: the limit is ``factor * quality of dense + offset``.
    seeds : tuple of int
        Where none are named.
    words : str
        The limit, for people.
    """

    ratio: float
    lower: bool
    factor: float
    offset: float
    seeds: tuple[int, ...]
    words: str

    def reaches(self, quality: float, dense: float) -> bool:
        """Tell whether a quality is within the limit."""
        limit = self.factor * dense + self.offset
        return quality <= limit if self.lower else quality >= limit


# Of digits, whose model has 38 thousand parameters, less than a twentieth is too few values for an autoencoder.
GOALS = {
    "digits": Goal(0.05, False, 1.0, -0.015, (0, 1, 2, 3, 4), "the held-out accuracy of dense less 0.015"),
    "text-lstm": Goal(0.01, True, 1.02, 0.0, (0, 1, 2), "1.02 times the held-out loss of dense"),
}

EXCHANGES: Mapping[str, Mapping[str, Any]] = {
    DENSE: {"id": "dense"},
    "topk": {"id": "topk"},
    "star-topk": {"id": "topk"},
    "lgc-ring": {"id": "lgc"},
    "lgc-ring-selected": {"id": "lgc", "error": "selected"},
    "lgc-server": {"id": "lgc", "instance": "server"},
    "lgc-server-selected": {"id": "lgc", "instance": "server", "error": "selected"},
    "lgc-linear": {"id": "lgc", "code": "linear"},
}
"""Configurations by name, but for the ratio."""
# Pinned, so that no choice depends on the network, and nothing but codes is broadcast in the course of a run.
_COLLECTIVES = {"dense": "allreduce", "topk": "allgather", "star-topk": "star-topk"}


@dataclass(frozen=True)
class Training:
    """A call of `mpicomp train`.

    Attributes
    ----------
    exchange : str
        Of `EXCHANGES`.
    """

    task: str
    exchange: str
    seed: int

    @property
    def name(self) -> str:
        """How its files begin."""
        return f"{self.task}-{self.exchange}-{self.seed}"

    def __str__(self) -> str:
        """Say for people what it is."""
        return f"{self.task}, {self.exchange}, seed {self.seed}"


def runs_of(exchanges: Sequence[str], seeds: Mapping[str, Sequence[int]]) -> list[Training]:
    """Give all trainings in their order: a seed after the other, so that all is known of some when time is over."""
    every = sorted({seed for own in seeds.values() for seed in own})
    return [
        Training(task, name, seed) for seed in every for task, own in seeds.items() if seed in own for name in exchanges
    ]


def words_of(run: Training, steps: int, phases: tuple[int, int] = PHASES) -> list[str]:
    """Give the words after ``mpicomp`` for a training, but for the files that it writes."""
    config = dict(EXCHANGES[run.exchange])
    if config["id"] != DENSE:
        config["ratio"] = GOALS[run.task].ratio
    if config["id"] == LGC.id:
        config["dense_steps"], config["training_steps"] = phases
    words = ["train", "--task", run.task, "--seed", str(run.seed), "--steps", str(steps), "--no-verdict"]
    words += ["--compressor", json.dumps(config), "--collective", _COLLECTIVES.get(run.exchange, "learned")]
    return [*words, "--correlation", str(max(1, steps // _LOOKS))]


@dataclass
class Finished(Ended[Training]):
    """What became of a training.

    Attributes
    ----------
    quality : float
        On all held-out data, in the end.
    late : mapping
        Of the steps in which codes travel, as rank 0 has seen them: ``wire_bytes`` and ``sent_bytes`` (means),
        ``kernels_s`` (what exchanges compute) and ``step_s`` (medians), and ``code_error`` (mean, or None).
    errors : tuple of float or None
        Of the code, in the first and the last tenth of the steps in which it is learnt; None where none is.
    buckets : list of dict
        The last step's, as ``train --metrics`` has them.
    """

    quality: float = float("nan")
    late: dict[str, float | None] = field(default_factory=dict)
    errors: tuple[float | None, float | None] = (None, None)
    buckets: list[dict[str, Any]] = field(default_factory=list)


class Runner:
    """Runs trainings one after the other.

    Parameters
    ----------
    folder : Path
        Of their files; see `mpicomp.bench.measure.jobs.Folder`.
    ranks : int
        Of each training, on this host.
    steps : int
        More than those of both phases.
    phases : tuple of int
        Steps of the phases before codes travel.
    start : callable, optional
        See `mpicomp.bench.measure.jobs.Start`.
    """

    def __init__(
        self, folder: Path, ranks: int, steps: int, phases: tuple[int, int] = PHASES, start: Start | None = None
    ) -> None:
        self.finished: dict[Training, Finished] = {}
        self.ranks = ranks
        self._folder = Folder(folder, start)
        self._steps = steps
        self._phases = phases

    @property
    def learnt(self) -> int:
        """The step from which on codes travel. Bytes and seconds of all exchanges are those from here to the end."""
        return sum(self._phases)

    def run(self, run: Training, left_s: float) -> Finished:
        """Run one, unless its files are complete, in at most so many seconds."""
        words = words_of(run, self._steps, self._phases)
        finished = Finished(run, FAILED, words=words)
        job = Job(
            run.name,
            lambda: on_one_host(self.ranks, words),
            {"--json": "json", "--metrics": "jsonl"},
            {"ranks": self.ranks, "words": words},
        )
        self._folder.run(job, finished, lambda: self._fill(finished), left_s, self.expected_s(run))
        self.finished[run] = finished
        return finished

    def expected_s(self, run: Training) -> float:
        """Give the mean seconds of other seeds of a run, or else of its task; 0 at first."""
        done = [own for own in self.finished.values() if own.status == DONE and own.run.task == run.task]
        same = [own for own in done if replace(own.run, seed=run.seed) == run]
        return fmean([own.seconds for own in same or done] or [0.0])

    def _fill(self, finished: Finished) -> bool:
        """Read the files of a run, and tell whether they are complete."""
        outcome = read_json(self._folder.path(finished.run.name, "json"))
        lines = read_lines(self._folder.path(finished.run.name, "jsonl"))
        try:
            finished.quality = float(outcome["quality"]["value"])
            steps = int(outcome["steps"])
            finished.late = _late(lines[self.learnt :])
            learning = [own for own in map(_code_error, lines[: self.learnt]) if own is not None]
            finished.buckets = lines[-1]["buckets"]
        except (ValueError, KeyError, TypeError, IndexError):
            return False
        finished.outcome = outcome
        if learning:
            tenth = max(1, len(learning) // 10)
            finished.errors = (fmean(learning[:tenth]), fmean(learning[-tenth:]))
        return len(lines) == steps


def _late(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    errors = [own for own in map(_code_error, lines) if own is not None]
    return {
        "wire_bytes": fmean(line["wire_bytes"] for line in lines),
        "sent_bytes": fmean(line["sent_bytes"] for line in lines),
        "kernels_s": median(line["phases_s"]["compress"] + line["phases_s"]["decode"] for line in lines),
        "step_s": median(line["seconds"] for line in lines),
        "code_error": fmean(errors) if errors else None,
    }


def _code_error(line: Mapping[str, Any]) -> float | None:
    """Give the mean over buckets; None where none of them can tell."""
    known = [bucket["code_error"] for bucket in line["buckets"] if bucket["code_error"] is not None]
    return fmean(known) if known else None
