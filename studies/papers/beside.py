"""The tables of papers beside ours: options, rows that a later run goes on from, trainings, and how tables are printed."""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # where the other studies are

import kept_rows
from mpicomp.bench.lab.units import parse_bandwidth
from mpicomp.bench.measure import jobs, results
from mpicomp.bench.measure.networks import Network, run_in_lab

from mpicomp.cli.options import check_least
from mpicomp.errors import ConfigurationError, MpicompError
from mpicomp.rounds import dense_ring_bytes

PLUGIN = str(Path(__file__).with_name("resnet.py").resolve())
"""Has the task of ResNet-20."""
DENSE = ("--compressor", "dense")
"""Words for `mpicomp train`."""

_LOOKS = 15  # at held-out data, in a training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that all of them have."""
    parser.add_argument("--rows", metavar="F.jsonl", help="append every row to F; what is there is not measured again")
    parser.add_argument("--limit", type=float, default=90.0, metavar="M", help="minutes; what is begun is ended (90)")
    parser.set_defaults(alone=True)


def option(arm: Mapping[str, Any], collective: str | None = None) -> tuple[str, ...]:
    """Return the words for `mpicomp train` that name a compressor, and nothing dense at first."""
    words = ("--compressor", json.dumps(dict(arm)), "--warmup", "0")
    return words if collective is None else (*words, "--collective", collective)


@dataclass
class Rows:
    """Rows of a study, and the time that it has left.

    Attributes
    ----------
    made : list of dict
        All of them, in the order in which they were made.
    """

    study: str
    kept: kept_rows.Rows
    end: float
    late: list[str] = field(default_factory=list)

    @property
    def made(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return self.kept.made

    def has(self, *key: Any) -> bool:
        """Return whether there is a row of this key."""
        return any(tuple(row[name] for name in self.kept.key) == key for row in self.made)

    def find(self, *key: Any) -> dict[str, Any] | None:
        """Return the row of this key, None where there is none."""
        return next((row for row in self.made if tuple(row[name] for name in self.kept.key) == key), None)

    def complete(self, make: Any, *key: Any) -> None:
        """Make the row of this key, unless it is there; one that fails is told and left out."""
        name = ", ".join(map(str, key))
        if self.has(*key):
            return
        if time.monotonic() > self.end:
            self.late.append(name)
            return
        begin = time.monotonic()
        try:
            made = self.kept.complete(lambda *own: dict(zip(self.kept.key, own, strict=True)) | make(*own), *key)
        except MpicompError as error:
            print(f"{name}: failed: {error}", flush=True)
            self.late.append(name)
            return
        assert made is not None
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


def begin(study: str, arguments: argparse.Namespace, key: Sequence[str]) -> Rows:
    """Return the rows that are there, and the time until no more are made."""
    if not 0 < arguments.limit < math.inf:
        raise ConfigurationError(f"{study}: --limit must be minutes above 0, got {arguments.limit}")
    return Rows(study, kept_rows.open_rows(study, arguments.rows, key), time.monotonic() + 60 * arguments.limit)


def train(
    arm: Sequence[str],
    task: str,
    steps: int,
    ranks: int,
    seed: int = 0,
    network: Network | None = None,
    lab: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, and return what a row has of it.

    Parameters
    ----------
    arm : sequence of str
        Words after ``mpicomp train`` that name the exchange.
    task : str
        Of `mpicomp train`, or resnet20.
    steps, ranks, seed : int
        Of the training.
    network : Network or None
        Of a lab with a host for each rank; None is one host.
    lab : sequence of str
        More words for ``mpicomp lab run``.

    Returns
    -------
    dict
        ``quality`` in the end, ``step_s``, the median step of the slowest rank, and ``compute_s`` of rank 0 in it;
        ``sent_bytes`` and ``wire_bytes`` of rank 0 in the whole run, ``dense_bytes`` and ``dense_wire_bytes`` of a
        dense one; ``kept``, the share of elements that was sent, mean over steps; ``curve``, pairs of steps and
        quality; ``plans``, of every step its seconds, the mean ratio and the collectives.

    Raises
    ------
    MpicompError
        Where it fails.
    """
    check_least("train", "steps", steps)
    with tempfile.TemporaryDirectory(prefix="mpicomp-papers-") as folder:
        outcome, lines = Path(folder) / "o.json", Path(folder) / "m.jsonl"
        words = ["train", "--plugin", PLUGIN, "--task", task, "--seed", str(seed), "--steps", str(steps), *arm]
        words += ["--no-verdict", "--evaluate-every", str(max(1, steps // _LOOKS))]
        words += ["--json", str(outcome), "--metrics", str(lines)]
        if network is None:
            command, more = jobs.on_one_host(ranks, words)
            log = Path(folder) / "log"
            if jobs.execute(command, {**os.environ, **more}, log, 1800.0) != 0:
                raise MpicompError(f"train: {' '.join(arm)}: {jobs.last_words(log)}")
        else:
            run_in_lab(ranks, network, words, lab, lambda line: None)
        return _row(jobs.read_json(outcome), jobs.read_lines(lines))


def _row(outcome: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numel = sum(bucket["numel"] for bucket in lines[0]["buckets"])
    kept = [_kept(line["buckets"]) / numel for line in lines]
    return {
        "quality": outcome["quality"]["value"],
        "step_s": outcome["median_step_s"],
        "compute_s": outcome["phases_s"]["compute"],
        "sent_bytes": outcome["sent_bytes"],
        "wire_bytes": outcome["wire_bytes"],
        "dense_bytes": outcome["dense_bytes"],
        "dense_wire_bytes": outcome["dense_wire_bytes"],
        "once_bytes": outcome["once_bytes"],
        "numel": numel,
        "kept": sum(kept) / len(kept),
        "curve": [(line["step"] + 1, line["quality"]) for line in lines if line["quality"] is not None],
        "plans": [
            (line["seconds"], own, "+".join(sorted({bucket["collective"] for bucket in line["buckets"]})))
            for line, own in zip(lines, kept, strict=True)
        ],
    }  # fmt: skip


def _kept(buckets: Sequence[Mapping[str, Any]]) -> float:
    return sum(bucket["numel"] * bucket["ratio_reached"] for bucket in buckets)


def steps_to(row: Mapping[str, Any], target: float, lower: bool) -> int | None:
    """Return the steps after which a training's quality was first as good as a target, None where it never was.

    Examples
    --------
    >>> steps_to({"curve": [(10, 0.5), (20, 0.9), (30, 0.8)]}, 0.8, lower=False)
    20
    """
    return next((step for step, own in row["curve"] if (own <= target if lower else own >= target)), None)


def bandwidth_for(share: float, compute_s: float, numel: int, ranks: int) -> str:
    """Return the bandwidth at which dense exchange by a ring takes a share of a step that computes for so long.

    Examples
    --------
    >>> bandwidth_for(0.5, 0.1, 1_000_000, 4)
    '480mbit'
    """
    bits = 8 * dense_ring_bytes(numel, ranks)
    return f"{bits / (compute_s * share / (1 - share)) / 1e6:.3g}mbit"


def fits(bandwidth: str, most: str = "1gbit") -> bool:
    """Return whether a lab can have links of this bandwidth.

    Examples
    --------
    >>> fits("200mbit"), fits("3e+03mbit")
    (True, False)
    """
    return float(bandwidth.removesuffix("mbit")) * 1e6 <= parse_bandwidth(most)


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], notes: Sequence[str] = ()) -> None:
    """Print a table below its title, with what differs between the paper's set-up and this one."""
    print(f"\n{title}")
    results.show(rows, columns)
    for note in notes:
        print(f"- {note}")


def late(rows: Rows) -> None:
    """Say what was not measured."""
    if rows.late:
        print(f"\nnot measured, since the time was over or it failed: {'; '.join(rows.late)}")
