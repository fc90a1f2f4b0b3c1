"""Trainings of the study of learned codes and of the exchanges that they replace, and their jobs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import comparison
from comparison import DENSE, Goal, Training
from mpicomp.bench.measure import jobs
from mpicomp.bench.measure.jobs import FAILED, read_json, read_lines

from mpicomp import LGC

STEPS = 900
"""Of a training, if not told otherwise."""
PHASES = (LGC().dense_steps, LGC().training_steps)
"""Steps of the phases before codes travel, if not told otherwise."""

_LOOKS = 20  # comparisons of ranks' gradients in a training


GOALS = {
    "digits": Goal(False, 1.0, -0.015, (0, 1, 2, 3, 4), "the held-out accuracy of dense less 0.015"),
    "text-lstm": Goal(True, 1.02, 0.0, (0, 1, 2), "1.02 times the held-out loss of dense"),
}
RATIOS = {"digits": 0.05, "text-lstm": 0.01}
"""Of digits, whose model has 38 thousand parameters, less than a twentieth is too few values for an autoencoder."""

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


def runs_of(exchanges: Sequence[str], seeds: Mapping[str, Sequence[int]]) -> list[Training]:
    """Return all trainings in their order: a seed after the other, so that all is known of some when time is over."""
    every = sorted({seed for own in seeds.values() for seed in own})
    return [
        Training(task, name, seed) for seed in every for task, own in seeds.items() if seed in own for name in exchanges
    ]


def words_of(run: Training, steps: int, phases: tuple[int, int] = PHASES) -> list[str]:
    """Return the words after ``mpicomp`` for a training, but for the files that it writes."""
    config = dict(EXCHANGES[run.arm])
    if config["id"] != DENSE:
        config["ratio"] = RATIOS[run.task]
    if config["id"] == LGC.id:
        config["dense_steps"], config["training_steps"] = phases
    words = ["train", "--task", run.task, "--seed", str(run.seed), "--steps", str(steps), "--no-verdict"]
    words += ["--compressor", json.dumps(config), "--collective", _COLLECTIVES.get(run.arm, "learned")]
    return [*words, "--correlation", str(max(1, steps // _LOOKS))]


@dataclass
class Finished(jobs.Finished):
    """Result of a training with a learned code.

    Attributes
    ----------
    late : mapping
        Of the steps in which codes travel, as rank 0 has seen them: ``wire_bytes`` and ``sent_bytes`` (means),
        ``kernels_s`` (what exchanges compute) and ``step_s`` (medians), and ``code_error`` (mean, or None).
    errors : tuple of float or None
        Of the code, in the first and the last tenth of the steps in which it is learnt; None where none is.
    buckets : list of dict
        The last step's, as ``train --metrics`` has them.
    """

    late: dict[str, float | None] = field(default_factory=dict)
    errors: tuple[float | None, float | None] = (None, None)
    buckets: list[dict[str, Any]] = field(default_factory=list)


class Runner(comparison.Runner):
    """Runs trainings one after the other.

    Parameters
    ----------
    folder, ranks
        See `comparison.Runner`.
    steps : int
        More than those of both phases.
    phases : tuple of int
        Steps of the phases before codes travel.
    """

    finished: dict[Training, Finished]

    def __init__(self, folder: Path, ranks: int, steps: int, phases: tuple[int, int] = PHASES) -> None:
        super().__init__(folder, ranks)
        self._steps = steps
        self._phases = phases

    @property
    def learnt(self) -> int:
        """The step from which on codes travel. Bytes and seconds of all exchanges are those from here to the end."""
        return sum(self._phases)

    def run(self, run: Training, left_s: float) -> Finished:
        """See `comparison.Runner`."""
        words = words_of(run, self._steps, self._phases)
        finished = Finished(run, FAILED, words=words)
        self.run_job(finished, words, {"--json": "json", "--metrics": "jsonl"}, {"ranks": self.ranks}, left_s)
        self.finished[run] = finished
        return finished

    def fill(self, finished: Finished) -> bool:
        """See `comparison.Runner`."""
        outcome = read_json(self.folder.path(finished.run.name, "json"))
        lines = read_lines(self.folder.path(finished.run.name, "jsonl"))
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

    def summary(self, finished: Finished) -> str:
        """See `comparison.Runner`."""
        wire_bytes = finished.late["wire_bytes"] or 0
        return f", quality {finished.quality:.4f}, {wire_bytes:,.0f} bytes left rank 0 in a step"


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
    """Return the mean over buckets; None where none of them can tell."""
    known = [bucket["code_error"] for bucket in line["buckets"] if bucket["code_error"] is not None]
    return fmean(known) if known else None
